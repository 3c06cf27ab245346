"""Session hooks of a request: store its prompt, release its session, prefill its successor."""

import asyncio
import logging
import secrets
from array import array
from collections.abc import Coroutine
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Cancel, Prefetch, RankKey, Release, owner
from kvmesh.frontend import metrics
from kvmesh.frontend.answers.answer import Answer, name_after
from kvmesh.frontend.conversation import (
    Block,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.dialects.templates.frame_probe import CONTINUE
from kvmesh.frontend.dispatch.control_client import ControlClient
from kvmesh.frontend.dispatch.task import SequenceTask
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.generation.active_request import ActiveRequest
from kvmesh.frontend.namespaces import certain_conversation, inferred
from kvmesh.frontend.preprocess.conversation_key import MASK
from kvmesh.frontend.preprocess.preprocessor import CUT, PreparedRequest, Preprocessor
from kvmesh.frontend.sessions.histories import Histories
from kvmesh.frontend.sessions.last_prompts import LastPrompts
from kvmesh.frontend.sessions.speculation_gate import (
    FollowUp,
    FollowUpFamily,
    PlannedSpeculation,
    SpeculationGate,
    Waits,
)
from kvmesh.frontend.sessions.speculations import (
    LIFETIME_S,
    Speculation,
    SpeculativePrefills,
    common_blocks,
)
from kvmesh.frontend.turn_memo import NO_MEMO
from kvmesh.hashing import HASH_BYTES, block_hashes
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.tracing.names import SPECULATIVE_PREFILL, STATUS
from kvmesh.tracing.span import TraceSpan
from kvmesh.tracing.tracer import linked

log = logging.getLogger(__name__)
MAX_TASKS = 1024
DEADLINE_S = 30.0


def successor(
    request: GenerateRequest, answer: list[Block], kept: Answer | None = None
) -> GenerateRequest | None:
    """The request that probably follows `answer`, with a `CUT` where the client's text begins.

    `kept` is the answer as it is stored, so that later prompts show all of it. None if nothing can
    be predicted.
    """
    if kept is None and not request.returns_thinking:
        answer = [block for block in answer if not isinstance(block, Thinking)]
    if not answer or not request.messages or request.template_args.get(CONTINUE):
        return None
    calls = [block.id for block in answer if isinstance(block, ToolCall)]
    results: list[Block] = [ToolResult(call, [Text(CUT)]) for call in calls]
    following = Message("tool", results) if results else Message("user", [Text(CUT)])
    messages = [
        *request.messages,
        Message("assistant", answer, kept.generated if kept else None),
        following,
    ]
    return replace(request, messages=messages, memo=NO_MEMO)  # others will follow


class HookedRequest(Struct):
    """A request and the session under which its prompt is stored.

    `speculation` was made for it; `planned` is the one that may follow its answer. `stopped`: the
    request arrived while the worker was computing the speculation.
    """

    prepared: PreparedRequest
    session: str | None
    speculation: Speculation | None = None
    stopped: bool = False
    planned: PlannedSpeculation | None = None


class SessionHooks:
    """Call `begin` and `end` around every request; at most MAX_TASKS background tasks follow it."""

    def __init__(
        self,
        last_prompts: LastPrompts,
        control: ControlClient,
        preprocessor: Preprocessor,
        gate: SpeculationGate,
        max_tokens: int,
    ) -> None:
        self._histories = Histories(last_prompts)
        self._control = control
        self._preprocessor = preprocessor
        self._gate = gate
        self._max_tokens = max_tokens
        self._speculations = SpeculativePrefills()
        self._tasks = BackgroundTasks()

    def begin(self, prepared: PreparedRequest) -> HookedRequest:
        """Store the session's prompt and cancel the speculative prefill made for it."""
        prompt, request = prepared.prompts[0], prepared.request
        hooked = HookedRequest(prepared, self._histories.begin(prepared))
        alone = request.n == 1 and not prompt.images
        if request.messages and alone and not request.hints.load_test:
            name = prepared.model.card.name
            tenant = owner(request.cache_salt)
            family = FollowUpFamily(name, request.agent, request.returns_thinking, tenant)
            hooked.planned = self._gate.plan(family, request.speculative)
            prepared.speculates = hooked.planned is not None
        speculation = self._speculations.pop(
            request.cache_salt, request.hints.session, prompt.sequence_hashes
        )
        if speculation is None:
            return hooked
        self._start(self._stop(speculation, hooked))
        fits = speculation.fits(prompt.sequence_hashes)
        prepared.ahead = speculation.ahead(fits, prepared.model.card.block_size)
        if fits:
            hooked.speculation = speculation
        else:
            self._count(speculation, 0, speculation.requested_tokens)
        return hooked

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
            # the prompt uses all that a stopped speculation has computed, and never the rest
            computed = ahead.used if hooked.stopped else ahead.tokens
            self._count(hooked.speculation, ahead.used, computed)
        if request.hints.session_final and request.hints.session is not None:
            cards = self._control.holders_of([prepared.model.card.name])
            command = Release(sessions=[request.hints.session])
            self._control.post(cards, command)
            return
        answer = self._keep(active)
        if hooked.planned and transcript is not None and stream.finish == "stop":
            blocks = transcript.blocks(in_order) if answer is None else answer.blocks
            calls = any(isinstance(block, ToolCall) for block in blocks)
            waits: Waits = "tools" if calls else "user"
            following = successor(request, blocks, answer)
            if following is not None and self._gate.allows(hooked.planned, waits):
                follow_up = FollowUp(hooked.planned.family, waits)
                self._start(self._speculate(hooked, active, following, follow_up))

    def _keep(self, active: ActiveRequest) -> Answer | None:
        """Store an answer that a client may return other than it was generated."""
        prepared, answers = active.prepared, self._preprocessor.answers
        stream = active.tasks[0].stream
        if answers is None or not prepared.keeps_answer:
            return None
        request, model = prepared.request, prepared.model
        tenant, kept, blocks = request.cache_salt, None, active.answer()
        name = name_after(request.messages, blocks) if blocks else ""
        if name:
            made = None if active.is_cut else model.dialect.generated(request, stream.tokens)
            kept = Answer(model.card.files, blocks, made, prepared.form.rewrites_calls)
            answers.record(tenant, request.hints.conversation & MASK, name, kept)
        if stream.finish in ("stop", "length"):
            answers.served(tenant, request.messages, name)
        return kept

    async def run(self) -> None:
        """Count speculations whose prompt has not arrived as wasted, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LIFETIME_S / 60)
            for speculation in self._speculations.expire(loop.time()):
                self._count(speculation, 0, speculation.requested_tokens)

    async def close(self) -> None:
        await self._histories.close()
        await self._tasks.close()

    async def _speculate(
        self,
        hooked: HookedRequest,
        active: ActiveRequest,
        following: GenerateRequest,
        follow_up: FollowUp,
    ) -> None:
        span = linked(active.prepared.request.span, SPECULATIVE_PREFILL)
        try:
            await self._predict(hooked, active, following, follow_up, span)
        finally:
            span.end()

    async def _predict(
        self,
        hooked: HookedRequest,
        active: ActiveRequest,
        following: GenerateRequest,
        follow_up: FollowUp,
        span: TraceSpan,
    ) -> None:
        prepared, task = active.prepared, active.tasks[0]
        try:
            tokens = await self._preprocessor.tokens_before(following, prepared.model)
        except ApiError as error:
            log.info("cannot predict the request after %s: %s", following.id, error)
            return
        size, salt = prepared.model.card.block_size, task.prompt.salt
        held = task.prompt.tokens + array("I", task.stream.tokens).tobytes()
        predicted = block_hashes(tokens, size, salt)[1]
        base = common_blocks(block_hashes(held, size, salt)[1], predicted)
        missing = len(predicted) // HASH_BYTES - base
        most = self._gate.most_tokens(follow_up, self._max_tokens)
        requested = min(missing, most // size) * size
        if not base or requested <= 0:
            self._gate.record(follow_up, 0, 0)
            return
        rank = _prompt_rank(task)
        speculation = Speculation(
            id=inferred(prepared.request.cache_salt, f"sp_{secrets.token_hex(12)}"),
            tenant=prepared.request.cache_salt,
            session=hooked.session,
            instance=rank.instance,
            model=prepared.model.card.name,
            base_hash=predicted[(base - 1) * HASH_BYTES : base * HASH_BYTES],
            base_blocks=base,
            end_hash=predicted[-HASH_BYTES:],
            blocks=len(predicted) // HASH_BYTES,
            requested_tokens=requested,
            after=prepared.request.id,
            follow_up=follow_up,
            expires=asyncio.get_running_loop().time() + LIFETIME_S,
        )
        await self._prefill(active, speculation, rank, tokens, span)

    async def _prefill(
        self,
        active: ActiveRequest,
        speculation: Speculation,
        rank: RankKey,
        tokens: bytes,
        span: TraceSpan,
    ) -> None:
        """Have the worker that computed the prompt compute the missing tokens of the next one."""
        prepared, task = active.prepared, active.tasks[0]
        self.open(speculation)
        command = Prefetch(
            id=speculation.id,
            tokens=tokens,
            salt=task.prompt.salt,
            tenant=speculation.tenant,
            adapter=prepared.adapter,
            session=prepared.request.hints.session,
            conversation=certain_conversation(prepared.request.hints),
            deadline_s=DEADLINE_S,
            compute=speculation.requested_tokens,
            rank=rank.rank,
            traceparent=span.traceparent,
        )
        reply = await self._control.request(rank.instance, command)
        span.set(STATUS, "accepted" if reply.ok else "refused")
        hinted = prepared.request.speculative
        if not reply.ok:
            level = logging.INFO if hinted else logging.DEBUG
            log.log(level, "%s refuses a speculative prefill: %s", rank.instance, reply.reason)
            if self._speculations.remove(speculation.id) is not None:
                self._gate.record(speculation.follow_up, speculation.requested_tokens, 0)
            return
        if hinted:
            active.charge(speculation.requested_tokens)

    def open(self, speculation: Speculation) -> None:
        """Look out for the prompt of a speculation.

        Sessions that come after crowd out those of others: that says nothing about what follows.
        """
        for other in self._speculations.add(speculation):
            if speculation.replaces(other):
                self._count(other, 0, other.requested_tokens)
            else:
                wasted = metrics.speculative_tokens.labels(other.model, "wasted")
                wasted.inc(other.requested_tokens)

    async def _stop(self, speculation: Speculation, hooked: HookedRequest) -> None:
        reply = await self._control.request(speculation.instance, Cancel(speculation.id))
        hooked.stopped = reply.ok

    def _count(self, speculation: Speculation, useful: int, computed: int) -> None:
        """Count the computed tokens of a speculation, of which the next prompt used `useful`."""
        self._gate.record(speculation.follow_up, computed, useful)
        metrics.speculative_tokens.labels(speculation.model, "useful").inc(useful)
        metrics.speculative_tokens.labels(speculation.model, "wasted").inc(computed - useful)

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        if len(self._tasks) >= MAX_TASKS:
            work.close()
            log.warning("skipped the work after a request: %d tasks are running", MAX_TASKS)
            return
        self._tasks.start(work)


def _prompt_rank(task: SequenceTask) -> RankKey:
    """The rank that will probably compute the conversation's next prompt."""
    routed = task.dispatch.routed
    if routed is not None and routed.prefill is not None:
        return routed.prefill
    return RankKey(task.stream.instance, routed.rank if routed is not None else 0)
