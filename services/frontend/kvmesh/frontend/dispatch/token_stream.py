"""One sequence of tokens on its way from engines to a client, over every worker it lives on."""

import asyncio
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias

from kvmesh.bus.messages import Chunk
from kvmesh.frontend.errors import ApiError, InvalidRequest

Loss: TypeAlias = Literal["", "failed", "vanished"]


class ChunkResult(Enum):
    """What a chunk was: new tokens, nothing new, or proof that an earlier chunk is missing."""

    NEW = "new"
    OLD = "old"
    HOLE = "hole"


class Consumer(Protocol):
    """Whoever turns tokens into an answer; called from the event loop, must not block."""

    def ready(self, sequence: "TokenStream") -> None:
        """There are tokens past `sequence.taken`, or the sequence has ended."""
        ...


class Nobody:
    """The consumer of tokens that are not wanted."""

    def ready(self, sequence: "TokenStream") -> None:
        return


class TokenStream:
    """Tokens generated so far, and which attempt on which worker they come from.

    `id` names the sequence, `attempt` its current placement; the first `inherited` tokens are of
    earlier ones. Times are the event loop's. Where a first worker only computes the prompt, its
    sequence ends with the `handoff`, and what it `found` in its cache is all that counts as
    `cached` with the second one. `lost` says why its worker sends no more, and `loss` whether its
    engine "failed", as it says itself, or "vanished". `begun` is set with the first news of the
    current attempt.
    """

    __slots__ = (
        "attempt",
        "attempts",
        "begun",
        "cached",
        "consumer",
        "decode",
        "dirty",
        "ended",
        "engine_done",
        "error",
        "finish",
        "first_at",
        "flushed_at",
        "found",
        "handoff",
        "heard_at",
        "id",
        "inherited",
        "instance",
        "logprobs",
        "loss",
        "lost",
        "probes",
        "reported",
        "reported_at",
        "resend_at",
        "retention",
        "taken",
        "tokens",
    )

    def __init__(self, sequence_id: str, consumer: Consumer, now: float) -> None:
        self.id = sequence_id
        self.consumer = consumer
        self.attempt = sequence_id
        self.attempts = 0
        self.inherited = 0
        self.instance = ""
        self.tokens: list[int] = []
        self.begun: asyncio.Event = asyncio.Event()
        self.logprobs: list[dict[int, float]] = []
        self.taken = 0
        self.cached: list[int] | None = None
        self.found: list[int] | None = None
        self.handoff: dict[str, Any] | None = None
        self.retention: list[str] = []
        self.decode: str | None = None
        self.finish: str | None = None
        self.error: ApiError | None = None
        self.lost = ""
        self.loss: Loss = ""
        self.first_at: float | None = None
        self.heard_at = now
        self.flushed_at = 0.0
        self.resend_at = 0.0
        self.probes = 0
        self.reported = 0
        self.reported_at = now
        self.dirty = False
        self.engine_done = False
        self.ended: asyncio.Event = asyncio.Event()

    def next_attempt(self) -> None:
        """Each placement has its own id: news of an earlier one cannot touch a later one."""
        if self.attempts:
            self.attempt = f"{self.id}.{self.attempts}"
        self.attempts += 1
        self.inherited = len(self.tokens)

    def place(self, instance: str, now: float) -> None:
        """The current attempt goes to `instance`."""
        self.instance = instance
        self.heard_at = now
        self.probes = 0
        self.engine_done = False
        self.lost = ""
        self.loss = ""
        self.begun.clear()
        self.ended.clear()

    @property
    def fresh(self) -> int:
        """The number of tokens of the current attempt; with one its prompt is computed."""
        return len(self.tokens) - self.inherited

    def made_by(self, instance: str) -> int:
        """The same, if the current attempt is there."""
        return self.fresh if self.instance == instance else 0

    def take(self, chunk: Chunk, now: float) -> ChunkResult:
        """Add what is new in `chunk`. After a hole nothing is added until it is filled."""
        self.heard_at = now
        self.probes = 0
        self.begun.set()
        have = len(self.tokens)
        skip = have - chunk.offset
        if skip < 0:
            return ChunkResult.HOLE
        if chunk.cached is not None and self.cached is None:
            self.cached = min(chunk.cached, self.found or chunk.cached, key=sum)
            self.retention = chunk.retention or []
        fresh = chunk.tokens[skip:] if skip else chunk.tokens
        if not fresh and chunk.finish is None:
            return ChunkResult.OLD
        if self.first_at is None and fresh:
            self.first_at = now
        self.tokens += fresh
        if chunk.logprobs is not None:
            self.logprobs += chunk.logprobs[skip:]
        if chunk.finish is not None:
            self._end(chunk)
        return ChunkResult.NEW

    def _end(self, chunk: Chunk) -> None:
        self.engine_done = True
        if chunk.finish == "abort":
            failed = chunk.error is not None
            self.lose(chunk.error or "the engine gave the request up", "failed" if failed else "")
            return
        if chunk.invalid:
            self.error = InvalidRequest(f"The engine refused the request: {chunk.error}")
        elif chunk.finish == "error":
            self.error = ApiError("internal", chunk.error or "the engine failed")
        self.finish = chunk.finish
        self.handoff = chunk.handoff
        self.decode = chunk.decode
        self.ended.set()

    def lose(self, reason: str, loss: Loss = "") -> None:
        """Its worker will send no more; whoever follows it decides what is next."""
        if self.finish is None:
            self.lost, self.loss = reason, loss
            self.begun.set()
            self.ended.set()

    def fail(self, error: ApiError) -> None:
        """End it here, for example because its answer could not be written."""
        if self.finish is None:
            self.error = error
            self.finish = "error"
        self.begun.set()
        self.ended.set()

    def stop(self) -> None:
        """The frontend has seen enough (a stop string)."""
        if self.finish is None:
            self.finish = "stop"
        self.ended.set()
