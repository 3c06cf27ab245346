"""Session hooks of a request: store its prompt, release its session, prefill its successor."""

import asyncio
import logging
import secrets
from array import array
from collections.abc import Coroutine
from typing import Any

from msgspec import Struct

from kvmesh.bus.messages import Cancel, Prefetch, RankKey, Release
from kvmesh.frontend import metrics
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.dispatch.control_client import ControlClient
from kvmesh.frontend.dispatch.task import SequenceTask
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.generation.active_request import ActiveRequest
from kvmesh.frontend.namespaces import inferred
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, Preprocessor
from kvmesh.frontend.sessions.histories import Histories
from kvmesh.frontend.sessions.last_prompts import LastPrompts
from kvmesh.frontend.sessions.speculative_prefill import (
    CUT,
    LIFETIME_S,
    Speculation,
    SpeculativePrefills,
    common_blocks,
    successor,
)
from kvmesh.hashing import HASH_BYTES, block_hashes
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.tracing.names import SPECULATIVE_PREFILL, STATUS
from kvmesh.tracing.span import TraceSpan
from kvmesh.tracing.tracer import linked

log = logging.getLogger(__name__)
MAX_TASKS = 1024
DEADLINE_S = 30.0


class HookedRequest(Struct):
    """A request, the session under which its prompt is stored, and the speculation made for it."""

    prepared: PreparedRequest
    session: str | None
    speculation: Speculation | None = None


class SessionHooks:
    """Call `begin` and `end` around every request; at most MAX_TASKS background tasks follow it."""

    def __init__(
        self,
        last_prompts: LastPrompts,
        control: ControlClient,
        preprocessor: Preprocessor,
        max_tokens: int,
    ) -> None:
        self._histories = Histories(last_prompts)
        self._control = control
        self._preprocessor = preprocessor
        self._max_tokens = max_tokens
        self._speculations = SpeculativePrefills()
        self._tasks = BackgroundTasks()

    def begin(self, prepared: PreparedRequest) -> HookedRequest:
        """Store the session's prompt and cancel the speculative prefill made for it."""
        prompt = prepared.prompts[0]
        session = self._histories.begin(prepared)
        tenant = prepared.request.cache_salt
        speculation = self._speculations.pop(tenant, prompt.sequence_hashes)
        if speculation is None:
            return HookedRequest(prepared, session)
        self._start(self._control.request(speculation.instance, Cancel(speculation.id)))
        fits = speculation.fits(prompt.sequence_hashes)
        prepared.ahead = speculation.ahead(fits, prepared.model.card.block_size)
        if fits:
            return HookedRequest(prepared, session, speculation)
        _count(speculation, 0)
        return HookedRequest(prepared, session)

    def end(self, hooked: HookedRequest, active: ActiveRequest, in_order: bool) -> None:
        """Release the session if it is final, or prefill its next prompt; after any outcome.

        `in_order`: the API's clients return text, thinking and calls in the order of the answer.
        """
        prepared, stream = hooked.prepared, active.tasks[0].stream
        if hooked.session is not None:
            self._histories.end(prepared, hooked.session, stream)
        request, transcript = prepared.request, active.transcript
        ahead = prepared.computed_ahead(sum(stream.cached or []))
        if hooked.speculation is not None and ahead is not None:
            _count(hooked.speculation, ahead.used)
        if request.hints.session_final and request.hints.session is not None:
            cards = self._control.holders_of([prepared.model.card.name])
            command = Release(sessions=[request.hints.session])
            self._control.post(cards, command)
        elif transcript is not None and stream.finish == "stop":
            blocks = transcript.blocks(in_order)
            if (following := successor(request, blocks)) is not None:
                self._start(self._speculate(active, following))

    async def run(self) -> None:
        """Count speculations whose prompt has not arrived as wasted, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LIFETIME_S / 60)
            for speculation in self._speculations.expire(loop.time()):
                _count(speculation, 0)

    async def close(self) -> None:
        await self._histories.close()
        await self._tasks.close()

    async def _speculate(self, active: ActiveRequest, following: GenerateRequest) -> None:
        span = linked(active.prepared.request.span, SPECULATIVE_PREFILL)
        try:
            await self._predict(active, following, span)
        finally:
            span.end()

    async def _predict(
        self, active: ActiveRequest, following: GenerateRequest, span: TraceSpan
    ) -> None:
        prepared, task = active.prepared, active.tasks[0]
        try:
            tokens = await self._preprocessor.tokens_before(following, prepared.model, CUT)
        except ApiError as error:
            log.info("cannot predict the request after %s: %s", following.id, error)
            return
        size, salt = prepared.model.card.block_size, task.prompt.salt
        held = task.prompt.tokens + array("I", task.stream.tokens).tobytes()
        predicted = block_hashes(tokens, size, salt)[1]
        base = common_blocks(block_hashes(held, size, salt)[1], predicted)
        missing = len(predicted) // HASH_BYTES - base
        requested = min(missing, self._max_tokens // size) * size
        if base and requested > 0:
            await self._prefill(active, tokens, predicted, base, requested, span)

    async def _prefill(
        self,
        active: ActiveRequest,
        tokens: bytes,
        sequence_hashes: bytes,
        base_blocks: int,
        requested_tokens: int,
        span: TraceSpan,
    ) -> None:
        """Have the worker that computed the prompt compute the missing tokens of the next one."""
        prepared, task = active.prepared, active.tasks[0]
        hints, tenant = prepared.request.hints, prepared.request.cache_salt
        rank = _prompt_rank(task)
        speculation = Speculation(
            id=inferred(tenant, f"sp_{secrets.token_hex(12)}"),
            tenant=tenant,
            instance=rank.instance,
            model=prepared.model.card.name,
            base_hash=sequence_hashes[(base_blocks - 1) * HASH_BYTES : base_blocks * HASH_BYTES],
            base_blocks=base_blocks,
            end_hash=sequence_hashes[-HASH_BYTES:],
            blocks=len(sequence_hashes) // HASH_BYTES,
            requested_tokens=requested_tokens,
            after=prepared.request.id,
            expires=asyncio.get_running_loop().time() + LIFETIME_S,
        )
        for replaced in self._speculations.add(speculation):
            _count(replaced, 0)
        command = Prefetch(
            id=speculation.id,
            tokens=tokens,
            salt=task.prompt.salt,
            tenant=tenant,
            adapter=prepared.adapter,
            session=hints.session,
            deadline_s=DEADLINE_S,
            compute=requested_tokens,
            rank=rank.rank,
            traceparent=span.traceparent,
        )
        reply = await self._control.request(rank.instance, command)
        span.set(STATUS, "accepted" if reply.ok else "refused")
        if not reply.ok:
            log.info("%s refuses a speculative prefill: %s", rank.instance, reply.reason)
            self._speculations.pop(tenant, sequence_hashes)
            return
        active.charge(requested_tokens)

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        if len(self._tasks) >= MAX_TASKS:
            work.close()
            log.warning("skipped the work after a request: %d tasks are running", MAX_TASKS)
            return
        self._tasks.start(work)


def _count(speculation: Speculation, useful: int) -> None:
    wasted = speculation.requested_tokens - useful
    metrics.speculative_tokens.labels(speculation.model, "useful").inc(useful)
    metrics.speculative_tokens.labels(speculation.model, "wasted").inc(wasted)


def _prompt_rank(task: SequenceTask) -> RankKey:
    """The rank that will probably compute the conversation's next prompt."""
    routed = task.dispatch.routed
    if routed is not None and routed.prefill is not None:
        return routed.prefill
    return RankKey(task.stream.instance, routed.rank if routed is not None else 0)
