"""Client of one worker for one prompt, without a frontend's migration and prompt deltas."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NoResponder, RequestTimeout
from kvmesh.bus.messages import (
    Cancel,
    Chunk,
    MessageDecoder,
    Resend,
    StepOutput,
    Work,
    WorkReply,
)
from kvmesh.router.errors import RouterError

log = logging.getLogger(__name__)
OFFER_TIMEOUT_S = 5.0  # longer than a frontend's: no other worker is tried
RESEND_S = 1.0
MAX_CHUNKS = 4096
_replies = MessageDecoder(WorkReply)
_steps = MessageDecoder(StepOutput)


class GenerationError(RouterError):
    """The worker `instance` refused the prompt, failed, or fell silent.

    `invalid`: any worker would refuse the prompt or fail at it.
    """

    def __init__(self, instance: str, reason: str, invalid: bool = False) -> None:
        super().__init__(f"{instance}: {reason}")
        self.instance = instance
        self.reason = reason
        self.invalid = invalid


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32; raises ValueError for one out of range."""
    try:
        return b"".join(token.to_bytes(4, "little") for token in token_ids)
    except OverflowError as error:
        raise ValueError(f"not a token id: {error}") from error


async def generate(bus: Bus, instance: str, work: Work, silence: float) -> AsyncGenerator[Chunk]:
    """Yield the chunks of `work` in order, each with new tokens or the finish reason.

    Raises GenerationError if the worker refuses, fails, or is silent for `silence` seconds.
    """
    chunks: asyncio.Queue[Chunk] = asyncio.Queue(MAX_CHUNKS)

    async def receive(step: StepOutput) -> None:
        if step.instance != instance:  # another worker has no part in this answer
            return
        for chunk in step.chunks:
            if chunk.request == work.request and not chunks.full():  # a gap is requested again
                chunks.put_nowait(chunk)

    subscription = await bus.subscribe(bus.subjects.out(work.frontend), _steps, receive)
    finished = False
    try:
        await _offer(bus, instance, work)
        async for chunk in _in_order(bus, instance, work, chunks, silence):
            yield chunk
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
        reason = reply.reason or reply.status
        raise GenerationError(instance, reason, invalid=reply.status == "invalid")


async def _in_order(
    bus: Bus, instance: str, work: Work, chunks: "asyncio.Queue[Chunk]", silence: float
) -> AsyncIterator[Chunk]:
    """Yield new tokens by offset: drop repeated ones and request missing ones."""
    received, limit, silent_s = work.generated, work.sampling.max_tokens, 0.0
    while True:
        try:
            async with asyncio.timeout(RESEND_S):
                chunk = await chunks.get()
        except TimeoutError:
            silent_s += RESEND_S
            if silent_s >= silence:
                raise GenerationError(instance, f"silent for {silence:g} s") from None
            bus.post(bus.subjects.ctl(instance), Resend(work.request, received))
            continue
        if chunk.offset > received:
            bus.post(bus.subjects.ctl(instance), Resend(work.request, received))
            continue
        silent_s = 0.0
        fresh = chunk.tokens[received - chunk.offset :]
        received += len(fresh)
        if received > limit:
            log.warning("%s sent more than %d tokens of %s", instance, limit, work.request)
            bus.post(bus.subjects.ctl(instance), Cancel(work.request))
            yield replace(chunk, tokens=fresh[: len(fresh) - received + limit], finish="length")
            return
        if chunk.error is not None or chunk.finish == "abort":
            invalid = chunk.invalid or chunk.finish == "error"
            raise GenerationError(instance, chunk.error or "the engine aborted", invalid)
        if fresh or chunk.finish is not None:
            yield replace(chunk, tokens=fresh)
        if chunk.finish is not None:
            return
