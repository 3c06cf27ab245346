"""What happens around a turn: its session is remembered, released at its end, or served ahead."""

import asyncio
import logging
import secrets
from array import array
from collections.abc import Coroutine
from typing import Any

from msgspec import Struct

from kvmesh.bus.messages import Cancel, Prefetch, RankKey, Release, SessionPrompt
from kvmesh.frontend import metrics
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.dispatch.control_client import ControlClient
from kvmesh.frontend.dispatch.dispatcher import SequenceTask
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.generation.active_request import ActiveRequest
from kvmesh.frontend.namespaces import inferred
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, Preprocessor
from kvmesh.frontend.sessions.last_prompts import LastPrompts
from kvmesh.frontend.sessions.speculative_prefill import (
    CUT,
    HASH,
    LIFETIME_S,
    Speculation,
    SpeculativePrefills,
    shared,
    successor,
)
from kvmesh.hashing import block_hashes

log = logging.getLogger(__name__)
MAX_TASKS = 1024
DEADLINE_S = 30.0


class HookedRequest(Struct):
    """One turn, and what was computed ahead for it and fits."""

    prepared: PreparedRequest
    ahead: Speculation | None = None


class SessionHooks:
    """Told of every turn; work that follows an answer runs in tasks, of which there are few."""

    def __init__(
        self, sessions: LastPrompts, holders: ControlClient, preparer: Preprocessor, budget: int
    ) -> None:
        self._sessions = sessions
        self._holders = holders
        self._preparer = preparer
        self._budget = budget
        self._speculations = SpeculativePrefills()
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, prepared: PreparedRequest) -> HookedRequest:
        prompt, session = prepared.prompts[0], prepared.request.hints.session
        if session is not None and len(prepared.prompts) == 1:
            last = SessionPrompt(prompt.tokens, prepared.adapter)
            self._sessions.remember(prepared.model.card.name, session, last)
        made = self._speculations.take(prepared.request.cache_salt, prompt.sequence_hashes)
        if made is None:
            return HookedRequest(prepared)
        self._do(self._holders.ask(made.instance, Cancel(made.id)))
        if made.fits(prompt.sequence_hashes):
            return HookedRequest(prepared, made)
        self._count(made, 0)
        return HookedRequest(prepared)

    def end(self, turn: HookedRequest, exchange: ActiveRequest, in_order: bool) -> None:
        """Its answer is over, whatever the end."""
        request = turn.prepared.request
        if turn.ahead is not None:
            cached = sum(exchange.jobs[0].sequence.cached or [])
            size = turn.prepared.model.card.block_size
            self._count(turn.ahead, turn.ahead.useful(cached, size))
        if request.hints.session_final and request.hints.session is not None:
            cards = self._holders.of([turn.prepared.model.card.name])
            command = Release(sessions=[request.hints.session])
            self._holders.post(cards, command)
        elif exchange.said is not None and exchange.jobs[0].sequence.finish == "stop":
            blocks = exchange.said.blocks(in_order)
            if (following := successor(request, blocks)) is not None:
                self._do(self._speculate(exchange, following))

    async def run(self) -> None:
        """Count what nobody came for; for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LIFETIME_S / 60)
            for made in self._speculations.lapse(loop.time()):
                self._count(made, 0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _speculate(self, exchange: ActiveRequest, following: GenerateRequest) -> None:
        prepared, job = exchange.prepared, exchange.jobs[0]
        try:
            tokens = await self._preparer.beginning(following, prepared.model, CUT)
        except ApiError as error:
            log.info("cannot predict what follows %s: %s", following.id, error)
            return
        size, salt = prepared.model.card.block_size, job.prompt.salt
        held = job.prompt.tokens + array("I", job.sequence.tokens).tobytes()
        sequence = block_hashes(tokens, size, salt)[1]
        base = shared(block_hashes(held, size, salt)[1], sequence)
        asked = min(len(sequence) // HASH - base, self._budget // size) * size
        if base and asked > 0:
            await self._compute(exchange, tokens, sequence, base, asked)

    async def _compute(
        self, exchange: ActiveRequest, tokens: bytes, sequence: bytes, base: int, asked: int
    ) -> None:
        """Have the worker that answered compute what it lacks; the caller's turn will tell."""
        prepared, job = exchange.prepared, exchange.jobs[0]
        hints, tenant = prepared.request.hints, prepared.request.cache_salt
        there = _computes_prompts(job)
        made = Speculation(
            id=inferred(tenant, f"sp_{secrets.token_hex(12)}"),
            tenant=tenant,
            instance=there.instance,
            model=prepared.model.card.name,
            known=sequence[(base - 1) * HASH : base * HASH],
            base=base,
            end=sequence[-HASH:],
            blocks=len(sequence) // HASH,
            asked=asked,
            expires=asyncio.get_running_loop().time() + LIFETIME_S,
        )
        for replaced in self._speculations.add(made):
            self._count(replaced, 0)
        command = Prefetch(
            id=made.id,
            tokens=tokens,
            salt=job.prompt.salt,
            tenant=tenant,
            adapter=prepared.adapter,
            session=hints.session,
            deadline_s=DEADLINE_S,
            compute=asked,
            rank=there.rank,
        )
        reply = await self._holders.ask(made.instance, command)
        if not reply.ok:
            log.info("%s does not prefetch: %s", made.instance, reply.reason)
            self._speculations.take(tenant, sequence)
            return
        exchange.spend(asked)

    def _count(self, made: Speculation, useful: int) -> None:
        metrics.speculative.labels(made.model, "useful").inc(useful)
        metrics.speculative.labels(made.model, "wasted").inc(made.asked - useful)

    def _do(self, work: Coroutine[Any, Any, object]) -> None:
        if len(self._tasks) >= MAX_TASKS:
            work.close()
            log.warning("too much follows answers: some of it is left out")
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _computes_prompts(job: SequenceTask) -> RankKey:
    """Where a conversation's next prompt will probably be computed."""
    routed = job.routed
    if routed is not None and routed.prefill is not None:
        return routed.prefill
    return RankKey(job.sequence.instance, routed.rank if routed is not None else 0)
