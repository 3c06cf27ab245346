"""Getting a sequence onto a worker, and onto another one when the first is lost."""

import asyncio
import logging
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery import Directory
from kvmesh.bus.errors import MessageTooLarge
from kvmesh.bus.messages import (
    RankKey,
    Refused,
    Routed,
    RouteRequest,
    Sampling,
    SeqFree,
    Work,
    prefill_part,
)
from kvmesh.frontend import metrics
from kvmesh.frontend.dispatch.isolation import Isolation
from kvmesh.frontend.dispatch.remote_prefill import PrefillFailed, RemotePrefill
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.dispatch.suspects import Suspects
from kvmesh.frontend.dispatch.token_inbox import TokenInbox
from kvmesh.frontend.dispatch.token_stream import Loss, TokenStream
from kvmesh.frontend.dispatch.work_client import WorkClient
from kvmesh.frontend.errors import ApiError, Culprit, InvalidRequest, Overloaded, Unavailable
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, PromptTokens
from kvmesh.hashing import block_hashes
from kvmesh.settings.schema import FrontendSettings

log = logging.getLogger(__name__)
RETRY_S = 0.1
LEAST_S = 0.001  # a deadline that has passed is for a router to refuse


@dataclass
class SequenceTask:
    """One sequence to be generated. `current` is its prompt, after a migration with what was
    generated before; `exclude` lists instances that have refused it or were lost with it, `avoided`
    those and the ones that did not answer when a router was last asked.
    `prefill` is its prompt while another worker computes it, `handoff` where that one left it.
    `arrived` is the Unix time of its place in the routers' queue, which it keeps once placed."""

    prepared: PreparedRequest
    prompt: PromptTokens
    sequence: TokenStream
    deadline: float
    index: int = 0
    exclude: list[str] = field(default_factory=list)
    refused: bool = False
    routed: Routed | None = None
    extended: PromptTokens | None = None
    avoided: list[str] = field(default_factory=list)
    prefill: RemotePrefill | None = None
    handoff: dict[str, Any] | None = None
    arrived: float | None = None

    @property
    def model(self) -> str:
        return self.prepared.model.card.name

    @property
    def sequences(self) -> list[TokenStream]:
        """What workers are at now."""
        return [self.sequence] if self.prefill is None else [self.sequence, self.prefill.sequence]

    @property
    def current(self) -> PromptTokens:
        return self.extended or self.prompt


class Dispatcher:
    """Places sequences and follows them to their end."""

    def __init__(
        self,
        bus: Bus,
        instance: str,
        inbox: TokenInbox,
        tracker: SequenceEventPublisher,
        directory: Directory,
        asking: RouteClient,
        settings: FrontendSettings,
    ) -> None:
        self._bus = bus
        self._instance = instance
        self._inbox = inbox
        self._tracker = tracker
        self._migration_limit = settings.migration_limit
        self._route_timeout = settings.route_timeout_s
        self._restart_wait = settings.restart_wait_s
        self._prefill_timeout = settings.prefill_timeout_s
        self.offers = WorkClient(bus, inbox, directory)
        self._asking = asking
        self.suspects = Suspects()
        self._isolation = Isolation(self.suspects, lambda: self.offers.buried_at)
        self._loop = asyncio.get_running_loop()

    async def place(self, job: SequenceTask) -> None:
        """Return once a worker has taken the sequence; raises ApiError if none will."""
        try:
            await self._place(job)
        except MessageTooLarge as error:
            reason = f"The request is larger than the mesh carries ({error.size} bytes)."
            raise ApiError("too_large", reason) from error

    async def _place(self, job: SequenceTask) -> None:
        while True:
            if job.sequence.id in self.suspects:
                await self._isolation.enter(job.sequence)
            routed = await self._route(job)
            if routed.prefill is not None:
                if job.handoff is None:
                    await self._prefill(job, routed.prefill)
                self._tracker.event(job.model, SeqFree(prefill_part(job.sequence.attempt)))
            if await self._offer(job, routed):
                return
            self._tracker.event(job.model, SeqFree(job.sequence.attempt))

    async def _route(self, job: SequenceTask) -> Routed:
        moving = job.extended is not None
        patience: float | None = job.deadline if moving else None
        job.sequence.next_attempt()
        while True:
            left = job.deadline - self._loop.time()
            if left <= 0:
                raise ApiError("timeout", "No worker was free in time.", retry_after=1.0)
            answer = await self._ask(job, left)
            if isinstance(answer, Routed):
                job.routed = answer
                return answer
            now = self._loop.time()
            if patience is None:
                patience = now + self._restart_wait
            _check(answer, job, now < patience)
            await asyncio.sleep(RETRY_S)

    async def _ask(self, job: SequenceTask, left: float) -> Routed | Refused:
        def compose(anew: bool, arrived: float | None) -> RouteRequest:
            if anew:
                job.sequence.next_attempt()
            job.avoided = [*job.exclude, *self.offers.silent]
            return _route_request(job, job.deadline - self._loop.time(), arrived)

        arrived, job.arrived = job.arrived, job.arrived or time.time()
        try:
            return await self._asking.ask(job.model, compose, left, arrived)
        except msgspec.MsgspecError as error:
            raise ApiError("internal", f"unreadable answer from a router: {error}") from error

    async def _prefill(self, job: SequenceTask, rank: RankKey) -> None:
        """Have the prompt computed there; if that fails, the worker that goes on computes it."""
        prefill = job.prefill = RemotePrefill(job.sequence, self._loop.time())
        code, work = "done", self._work(job, rank.rank)
        try:
            job.handoff = await prefill.run(
                self.offers, self._inbox, rank, work, self._prefill_timeout
            )
            job.sequence.found = prefill.sequence.cached
        except PrefillFailed as failure:
            code = failure.code
            log.warning(
                "the prompt of request %s was not computed by %s (%s), so it is by the next: %s",
                *(job.sequence.id, rank.instance, code, failure),
            )
            self._blame(job.sequence, prefill.sequence, prefill.sequence.loss)
        finally:
            job.prefill = None
        metrics.prefills.labels(job.model, code).inc()

    async def _offer(self, job: SequenceTask, routed: Routed) -> bool:
        work = self._work(job, routed.rank)
        sequence, instance = job.sequence, routed.instance
        careful = sequence.id in self.suspects
        # before it is: an engine may die of it sooner than its worker's answer is read
        self.suspects.placed(sequence.id, instance, lambda: sequence.made_by(instance))
        offered = await self.offers.make(sequence, instance, work, careful)
        if offered.status == "accepted":
            return True
        metrics.reroutes.labels(job.model, offered.status).inc()
        if offered.status == "invalid":
            raise InvalidRequest(f"The engine refused the request: {offered.reason}")
        job.refused = job.refused or offered.status in ("busy", "draining")
        if offered.status == "silent":
            self._blame(sequence, sequence, "vanished")
        elif offered.status == "away":
            await asyncio.sleep(RETRY_S)
        elif offered.status != "frozen":
            job.exclude.append(instance)
        return False

    def _blame(self, sequence: TokenStream, part: TokenStream, loss: Loss) -> None:
        """Raise Culprit if two engines were lost over it, the last one while it ran `part`."""
        if not loss:
            return
        failed = loss == "failed"
        if self.suspects.lost(sequence.id, part.instance, part.fresh, failed):
            metrics.culprits.inc()
            reason = part.lost or "the last one did not answer when it was offered"
            log.error("request %s is given to no further worker: %s", sequence.id, reason)
            raise Culprit(reason)

    def _work(self, job: SequenceTask, rank: int) -> Work:
        request = job.prepared.request
        return Work(
            request=job.sequence.attempt,
            frontend=self._instance,
            tokens=job.current.tokens,
            sampling=_sampling(job),
            salt=job.prompt.salt,
            adapter=job.prepared.adapter,
            rank=rank,
            priority=request.hints.priority,
            generated=len(job.sequence.tokens),
            session=request.hints.session,
            turn=request.turn,
            handoff=job.handoff,
            tenant=request.cache_salt,
            parent_session=request.hints.parent_session,
            retention=job.prompt.retention,
            decode=request.decode,
        )

    async def follow(self, job: SequenceTask) -> None:
        """Return when the sequence has ended; raises its error. Moves it off lost workers."""
        sequence = job.sequence
        moves = 0
        while True:
            await sequence.ended.wait()
            self._inbox.remove(sequence)
            if sequence.finish is not None:
                break
            self._leave(job)
            self._blame(sequence, sequence, sequence.loss)
            if moves == self._migration_limit:
                raise Unavailable(f"The worker was lost: {sequence.lost}")
            moves += 1
            await self._migrate(job)
        if sequence.error is not None:
            raise sequence.error

    def _leave(self, job: SequenceTask) -> None:
        """The old attempt may still run somewhere: it must not hold blocks for nobody."""
        self.offers.cancel(job.sequence)
        self._tracker.event(job.model, SeqFree(job.sequence.attempt))

    async def _migrate(self, job: SequenceTask) -> None:
        sequence = job.sequence
        log.warning(
            "request %s moves off %s after %d tokens: %s",
            *(sequence.id, sequence.instance, len(sequence.tokens), sequence.lost),
        )
        metrics.migrations.labels(job.model).inc()
        if len(sequence.tokens) >= job.prepared.max_tokens:
            sequence.finish = "length"
            return
        job.extended = _extended(job.prompt, sequence.tokens, job.prepared.model.card.block_size)
        job.exclude, job.refused = [sequence.instance], False
        job.handoff = None
        job.deadline = self._loop.time() + self._route_timeout
        await self.place(job)


def _route_request(job: SequenceTask, left: float, arrived: float | None) -> RouteRequest:
    request = job.prepared.request
    placement = request.placement
    if job.avoided:
        exclude = [*placement.exclude, *job.avoided]
        placement = msgspec.structs.replace(placement, exclude=exclude)
    return RouteRequest(
        request=job.sequence.attempt,
        model=job.model,
        sequence_hashes=job.current.sequence_hashes,
        tokens=job.current.count,
        max_tokens=job.prepared.max_tokens,
        deadline_s=max(left, LEAST_S),
        adapter=job.prepared.adapter,
        hints=request.hints,
        placement=placement,
        policy=request.policy,
        overrides=request.overrides,
        explain="routing" in request.extra_fields,
        salt=job.current.salt,
        arrived=arrived,
    )


def _check(refused: Refused, job: SequenceTask, patient: bool) -> None:
    """Raise what a refusal means to the client, unless it is worth asking again soon."""
    after = refused.retry_after_s
    if refused.code == "invalid":
        raise InvalidRequest(refused.reason)
    if refused.code == "overloaded":
        raise Overloaded(refused.reason, after)
    if refused.code == "deadline":
        raise ApiError("timeout", refused.reason, retry_after=after)
    if refused.code == "no_workers" and job.refused:
        raise Overloaded(f"Every worker of `{job.model}` is busy.", after)
    if not patient and refused.code != "no_workers":
        raise Unavailable(f"`{job.model}` cannot be served now: {refused.reason}", after)
    if not patient or (refused.unmet and not job.avoided):
        raise Unavailable(f"No worker serves `{job.model}` now: {refused.reason}", after)


def _extended(prompt: PromptTokens, generated: list[int], block_size: int) -> PromptTokens:
    tokens = prompt.tokens + array("I", generated).tobytes()
    _, sequence = block_hashes(tokens, block_size, prompt.salt)
    count = prompt.count + len(generated)
    return PromptTokens(tokens, count, sequence, prompt.salt, prompt.retention)


def _sampling(job: SequenceTask) -> Sampling:
    """Further choices of one prompt get further seeds, or they would all be the same."""
    request = job.prepared.request
    seed = request.sampling.seed
    return msgspec.structs.replace(
        request.sampling,
        max_tokens=job.prepared.max_tokens,
        guided=job.prepared.guided,
        seed=None if seed is None else seed + job.index % request.n,
    )
