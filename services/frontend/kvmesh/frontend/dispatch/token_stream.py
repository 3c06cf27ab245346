"""The tokens of one sequence, from its first worker to its last."""

import asyncio
import logging
import secrets
import sys
from collections.abc import Sequence
from enum import Enum
from math import inf
from typing import Any, Literal, TypeAlias

from kvmesh.bus.messages import Chunk
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.runtime.logs import printable
from kvmesh.tracing.span import NO_SPAN, TraceSpan

Loss: TypeAlias = Literal["", "failed", "vanished"]
log = logging.getLogger(__name__)
FINISHES = ("stop", "length", "abort", "error")
MAX_TIERS = 16
MAX_REASON = 2000  # characters


class ChunkResult(Enum):
    """Effect of a chunk: new tokens, nothing new, or an earlier chunk is missing."""

    NEW = "new"
    OLD = "old"
    GAP = "gap"


class TaskEvent:
    """An `asyncio.Event` for one task that waits at a time, in a fifth of the memory."""

    __slots__ = ("_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def clear(self) -> None:
        self._set = False

    def wait(self) -> "asyncio.Future[None]":
        """A future that is done once the flag is set."""
        waiter = asyncio.get_running_loop().create_future()
        if self._set:
            waiter.set_result(None)
        else:
            self._waiter = waiter
        return waiter


class TokenStream:
    """Tokens generated so far, and the attempt and worker that they come from.

    Only its own methods change it. `id` names the sequence, and `attempt` its current dispatch for
    routers; `work` names that for its worker, and `ref` in chunks. Both have a random part, since a
    worker could else send chunks for the attempt after its own. The first `inherited` tokens are
    from earlier attempts; tokens beyond `limit` end the sequence. Times are the event loop's.

    After a remote prefill, `prefill_cached` caps `cached`: both are cached prompt tokens by tier.
    `lost` is the reason why the worker sends no more; `loss` is "failed" if the engine reported an
    error, and "vanished" if the worker disappeared or fell silent. `started` is set at the first
    message of the current attempt, `ended` when the attempt is over. `device_s` is the device time
    of the current attempt, as far as its worker has reported it, `earlier_device_s` that of others.
    `engine_wait_s` is the time in the queue of the engine that computed the prompt, if known.
    `span` is that of the current attempt. `redirected`: the next attempt goes on after other tokens
    than the engine has generated. `vectors` are what pooled inputs have in place of tokens.
    `miscounted`: the engine has counted cached tokens that the prompt cannot have.
    """

    __slots__ = (
        "attempt",
        "attempts",
        "cached",
        "decode_outcome",
        "device_s",
        "earlier_device_s",
        "ended",
        "engine_done",
        "engine_wait_s",
        "error",
        "finish",
        "first_token_at",
        "handoff",
        "id",
        "inherited",
        "instance",
        "limit",
        "logprobs",
        "loss",
        "lost",
        "miscounted",
        "prefill_cached",
        "prompt_tokens",
        "received_at",
        "redirected",
        "ref",
        "retention_outcomes",
        "span",
        "started",
        "tokens",
        "vectors",
        "work",
    )

    def __init__(
        self,
        sequence_id: str,
        now: float,
        tokens: Sequence[int] = (),
        limit: int = sys.maxsize,
        prompt_tokens: int = sys.maxsize,
    ) -> None:
        self.id = sequence_id
        self.limit = limit
        self.prompt_tokens = prompt_tokens
        self._name(sequence_id)
        self.attempts = 0
        self.inherited = 0
        self.instance = ""
        self.tokens: list[int] = list(tokens)
        self.vectors: Sequence[bytes] = ()
        self.logprobs: list[dict[int, float]] = []
        self.cached: list[int] | None = None
        self.prefill_cached: list[int] | None = None
        self.handoff: dict[str, Any] | None = None
        self.retention_outcomes: Sequence[str] = ()
        self.decode_outcome: str | None = None
        self.finish: str | None = None
        self.error: ApiError | None = None
        self.lost = ""
        self.loss: Loss = ""
        self.miscounted = False
        self.first_token_at: float | None = None
        self.received_at = now
        self.device_s = 0.0
        self.earlier_device_s = 0.0
        self.engine_wait_s: float | None = None
        self.engine_done = False
        self.redirected = False
        self.span: TraceSpan = NO_SPAN
        self.started = TaskEvent()
        self.ended = TaskEvent()

    def next_attempt(self) -> None:
        """Begin an attempt under a new id, so that messages of earlier ones are ignored."""
        if self.attempts:
            self._name(f"{self.id}.{self.attempts}")
        self.attempts += 1
        self.inherited = len(self.tokens)

    def resume_as(self, sequence_id: str) -> None:
        """Continue another frontend's sequence, before the first attempt."""
        self.id = sequence_id
        self._name(sequence_id)

    def _name(self, attempt: str) -> None:
        ref = f"#{secrets.token_urlsafe(6)}"
        self.attempt, self.ref, self.work = attempt, ref, attempt + ref

    def dispatched(self, instance: str, now: float) -> None:
        """The current attempt is offered to `instance`."""
        self.instance = instance
        self.received_at = now
        self.earlier_device_s += self.device_s
        self.device_s = 0.0
        self.engine_done = False
        self.lost = ""
        self.loss = ""
        self.started.clear()
        self.ended.clear()

    def prefilled(self, cached: list[int] | None) -> None:
        """Another worker has computed the prompt and found `cached` tokens of it by tier."""
        self.prefill_cached = cached

    @property
    def counts_cached(self) -> bool:
        """True if the cached tokens are those of the current attempt, not of an earlier one."""
        return self.cached is None or not self.inherited

    @property
    def fresh(self) -> int:
        """Tokens of the current attempt; its prompt is computed once there is one."""
        return len(self.tokens) - self.inherited

    def fresh_on(self, instance: str) -> int:
        """`fresh` if the current attempt is on `instance`, else 0."""
        return self.fresh if self.instance == instance else 0

    def receive(self, chunk: Chunk, now: float) -> ChunkResult:
        """Add the new tokens of `chunk`; with a gap before it, or malformed, add nothing.

        A gap is no sign of life, since a worker may never fill it. Malformed output loses the
        attempt; a malformed measurement is left out.
        """
        self.started.set()
        have = len(self.tokens)
        skip = have - chunk.offset
        if skip < 0:
            return ChunkResult.GAP
        self.received_at = now
        if fault := _fault(chunk):
            self.lose(f"malformed output: {fault}", "failed")
            return ChunkResult.OLD
        if chunk.device_s is not None and _is_time(chunk.device_s):
            self.device_s = chunk.device_s
        if self.engine_wait_s is None and chunk.waited_s is not None and _is_time(chunk.waited_s):
            self.engine_wait_s = chunk.waited_s
        if chunk.cached is not None and self.counts_cached:
            self._count_cached(chunk.cached)
            self.retention_outcomes = chunk.retention or self.retention_outcomes
        fresh = chunk.tokens[skip:] if skip else chunk.tokens
        if not fresh and chunk.finish is None:
            return ChunkResult.OLD
        if self.first_token_at is None and fresh:
            self.first_token_at = now
        excess = have + len(fresh) - self.limit
        if excess > 0:
            fresh = fresh[: len(fresh) - excess]
        self.tokens += fresh
        if chunk.logprobs is not None:
            self.logprobs += chunk.logprobs[skip : skip + len(fresh)]
        if excess > 0:
            log.warning(
                "worker %s sent more than %d tokens of request %s, which is stopped",
                *(self.instance, self.limit, self.id),
            )
            self.stop("length")
        elif chunk.finish is not None:
            self._finish(chunk)
        return ChunkResult.NEW

    def _count_cached(self, cached: list[int]) -> None:
        """Take the engine's count of cached tokens, unless the prompt cannot have that many."""
        if len(cached) > MAX_TIERS or min(cached, default=0) < 0 or sum(cached) > self._most_cached:
            if not self.miscounted:
                log.warning(
                    "worker %s counts %s cached tokens in a prompt of %d of request %s: ignored",
                    *(self.instance, cached[:MAX_TIERS], self._most_cached, self.id),
                )
            self.miscounted = True
            return
        self.cached = min(cached, self.prefill_cached or cached, key=sum)

    @property
    def _most_cached(self) -> int:
        return self.prompt_tokens + self.inherited

    def _finish(self, chunk: Chunk) -> None:
        self.engine_done = True
        reason = told(chunk.error or "")
        if chunk.finish == "abort":
            self.lose(reason or "the engine aborted the request", "failed" if reason else "")
            return
        if chunk.invalid:
            self.error = InvalidRequest(f"The engine refused the request: {reason or 'no reason'}")
        elif chunk.finish == "error":
            self.error = ApiError("internal", reason or "the engine failed")
        self.finish = chunk.finish
        if chunk.vectors is not None:
            self.vectors, self.first_token_at = chunk.vectors, self.received_at
        self.handoff = chunk.handoff
        self.decode_outcome = chunk.decode
        self.ended.set()

    def engine_stopped(self) -> None:
        """The worker has been told to end the current attempt."""
        self.engine_done = True

    def lose(self, reason: str, loss: Loss = "") -> None:
        """End the attempt, whose worker sends no more; the dispatcher may make another one."""
        if self.finish is None:
            self.lost, self.loss = told(reason), loss
            self.started.set()
            self.ended.set()

    def redirect(self, count: int, tokens: list[int]) -> None:
        """End the attempt to go on with `tokens` in place of those behind the first `count`.

        A stream that has failed stays as it is.
        """
        if self.error is not None:
            return
        self.tokens = [*self.tokens[:count], *tokens]
        self.inherited = min(self.inherited, len(self.tokens))
        if self.logprobs:
            self.logprobs = [*self.logprobs[:count], *({} for _ in tokens)]
        self.redirected, self.finish = True, None
        self.lost, self.loss = "another token was wanted", ""
        self.started.set()
        self.ended.set()

    def fail(self, error: ApiError) -> None:
        """End the sequence with `error`."""
        if self.finish is None:
            self.error = error
            self.finish = "error"
        self.started.set()
        self.ended.set()

    def stop(self, finish: str) -> None:
        """End the sequence in the frontend: "stop" (a stop string), "length" or "cancelled"."""
        if self.finish is None:
            self.finish = finish
        self.ended.set()


def told(reason: str) -> str:
    """A worker's reason as a client may get it: bounded, and without control characters."""
    return printable(reason[:MAX_REASON])


def _fault(chunk: Chunk) -> str | None:
    """The fault of a chunk that no engine can mean, None for one without."""
    if chunk.offset < 0:
        return f"it begins at token {chunk.offset}"
    if chunk.tokens and min(chunk.tokens) < 0:
        return f"token {min(chunk.tokens)}"
    if chunk.finish is not None and chunk.finish not in FINISHES:
        return f"the end {chunk.finish!r}"
    if any(each and min(each) < 0 for each in chunk.logprobs or ()):
        return "a log probability of a negative token"
    return None


def _is_time(seconds: float) -> bool:
    return 0.0 <= seconds < inf
