"""Running one prompt on one worker and reading its tokens, for callers without a frontend."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NoResponder, RequestTimeout
from kvmesh.bus.messages import Cancel, Chunk, Resend, Sampling, StepOutput, Work, WorkReply
from kvmesh.router.errors import RouterError

OFFER_TIMEOUT_S = 5.0
RESEND_S = 1.0
MOST_CHUNKS = 4096
_replies = msgspec.msgpack.Decoder(WorkReply)
_steps = msgspec.msgpack.Decoder(StepOutput)


class GenerationError(RouterError):
    """A worker did not take the prompt, or failed with it; `instance` is the worker's."""

    def __init__(self, instance: str, reason: str) -> None:
        super().__init__(f"{instance}: {reason}")
        self.instance = instance
        self.reason = reason


def new_work(request: str, frontend: str, token_ids: Sequence[int], sampling: Sampling) -> Work:
    """The message for a worker; tokens will come to the out subject of `frontend`."""
    return Work(request=request, frontend=frontend, tokens=pack(token_ids), sampling=sampling)


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32; raises ValueError on what is none."""
    try:
        return b"".join(token.to_bytes(4, "little") for token in token_ids)
    except OverflowError as error:
        raise ValueError(f"not a token id: {error}") from error


async def generate(bus: Bus, instance: str, work: Work, silence: float) -> AsyncIterator[list[int]]:
    """Yield the tokens of `work` in order.

    Raises GenerationError if the worker refuses, fails, or is silent for `silence` seconds.
    """
    chunks: asyncio.Queue[Chunk] = asyncio.Queue(MOST_CHUNKS)

    async def take(step: StepOutput) -> None:
        for chunk in step.chunks:
            if chunk.request == work.request and not chunks.full():  # a hole is asked for again
                chunks.put_nowait(chunk)

    subscription = await bus.subscribe(bus.subjects.out(work.frontend), _steps, take)
    finished = False
    try:
        await _offer(bus, instance, work)
        async for tokens in _in_order(bus, instance, work.request, chunks, silence):
            yield tokens
        finished = True
    finally:
        await subscription.unsubscribe()
        if not finished:
            bus.post(bus.subjects.ctl(instance), Cancel(work.request))


async def _offer(bus: Bus, instance: str, work: Work) -> None:
    try:
        subject = bus.subjects.work(instance)
        reply = await bus.request(subject, work, _replies, OFFER_TIMEOUT_S)
    except (NoResponder, RequestTimeout) as error:
        raise GenerationError(instance, str(error)) from error
    if reply.status != "accepted":
        raise GenerationError(instance, reply.reason or reply.status)


async def _in_order(
    bus: Bus, instance: str, request: str, chunks: "asyncio.Queue[Chunk]", silence: float
) -> AsyncIterator[list[int]]:
    """Chunks by offset: what came twice is cut off, a hole is asked for again."""
    seen, quiet = 0, 0.0
    while True:
        try:
            async with asyncio.timeout(RESEND_S):
                chunk = await chunks.get()
        except TimeoutError:
            quiet += RESEND_S
            if quiet >= silence:
                raise GenerationError(instance, f"silent for {silence:g} s") from None
            bus.post(bus.subjects.ctl(instance), Resend(request, seen))
            continue
        if chunk.offset > seen:
            bus.post(bus.subjects.ctl(instance), Resend(request, seen))
            continue
        quiet = 0.0
        fresh = chunk.tokens[seen - chunk.offset :]
        seen += len(fresh)
        if fresh:
            yield fresh
        if chunk.error is not None:
            raise GenerationError(instance, chunk.error)
        if chunk.finish is not None:
            return
