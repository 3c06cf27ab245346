"""Dispatch of sequences to workers, and their migration when a worker is lost."""

import asyncio
import logging
import time
from array import array

import msgspec

from kvmesh.bus.errors import MessageTooLarge
from kvmesh.bus.messages import (
    BATCH_PRIORITY,
    RankKey,
    Refused,
    Routed,
    RouteRequest,
    Sampling,
    SeqFree,
    Work,
    batch_classes,
    of_class,
    prefill_part,
)
from kvmesh.frontend import metrics
from kvmesh.frontend.dispatch.attempt_trace import describe_attempt, end_attempt, end_route
from kvmesh.frontend.dispatch.isolation import Isolation
from kvmesh.frontend.dispatch.liveness import LivenessMonitor
from kvmesh.frontend.dispatch.remote_prefill import PrefillFailed, RemotePrefill
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.route_request import route_request
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.dispatch.suspects import Suspects
from kvmesh.frontend.dispatch.task import SequenceTask
from kvmesh.frontend.dispatch.token_stream import Loss, TokenStream
from kvmesh.frontend.dispatch.work_client import WorkClient
from kvmesh.frontend.errors import ApiError, InvalidRequest, Overloaded, PoisonRequest, Unavailable
from kvmesh.frontend.namespaces import certain_conversation
from kvmesh.frontend.preprocess.preprocessor import PromptTokens
from kvmesh.frontend.wake.waker import Waker
from kvmesh.hashing import block_hashes
from kvmesh.settings.schema import FrontendSettings, RouterSettings
from kvmesh.tracing import names
from kvmesh.tracing.span import TraceSpan

log = logging.getLogger(__name__)
FIRST_RETRY_S, RETRY_S = 0.01, 0.1


class Dispatcher:
    """Runs sequences on workers: `dispatch`, `follow` to the end, `release`."""

    def __init__(
        self,
        instance: str,
        workers: WorkClient,
        monitor: LivenessMonitor,
        routes: RouteClient,
        events: SequenceEventPublisher,
        waker: Waker,
        settings: FrontendSettings,
        router: RouterSettings,
    ) -> None:
        self._instance = instance
        self._workers = workers
        self._monitor = monitor
        self._routes = routes
        self._events = events
        self._waker = waker
        self._settings = settings
        self._batch_classes = batch_classes(router.batch_classes)
        self._batch_timeout = router.batch_timeout_s
        self._suspects = Suspects()
        self._isolation = Isolation(self._suspects, lambda: workers.lost_at)
        self._tasks: set[SequenceTask] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()

    @property
    def route_timeout_s(self) -> float:
        """The longest wait of a request that is not batch work for a placement."""
        return self._settings.route_timeout_s

    async def drain(self, timeout: float) -> None:
        """Return once no sequence is in flight; after `timeout` seconds fail the remaining ones."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            self._waker.stop()
            for task in self._tasks:
                task.dispatch.deadline = self._loop.time()
                if task.stream.instance:
                    task.stream.fail(Unavailable("The server is stopping."))

    async def dispatch(self, task: SequenceTask) -> None:
        """Return once a worker has accepted the sequence. Raises ApiError if none does."""
        task.dispatch.began = self._loop.time()
        if self._is_batch(task):
            task.dispatch.deadline = task.dispatch.began + self._batch_timeout
        self._tasks.add(task)
        self._idle.clear()
        stream = task.stream
        if stream.finish is None and len(stream.tokens) >= task.prepared.max_tokens:
            stream.stop("length")
        if stream.finish is not None:  # another frontend had generated all of it
            return
        if stream.tokens:
            block_size = task.prepared.model.card.block_size
            task.dispatch.extended = _extended(task.prompt, stream.tokens, block_size)
        self._monitor.watch(task.model, stream)
        await self._dispatch(task)

    def release(self, task: SequenceTask) -> None:
        """Free what the sequence holds in this process, in routers and in its worker."""
        stream = task.stream
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()
        self._monitor.unwatch(stream)
        self._workers.inbox.remove(stream)
        self._suspects.forget(stream.id)
        stream.stop("cancelled")
        end_attempt(stream)
        if stream.attempts:
            self._events.event(task.model, SeqFree(stream.attempt))
        self._stop_engine(stream)

    def _stop_engine(self, stream: TokenStream) -> None:
        """Stop the engine if it still runs the sequence."""
        if stream.instance and not stream.engine_done:
            self._workers.cancel(stream)
            stream.engine_stopped()

    async def _dispatch(self, task: SequenceTask) -> None:
        try:
            await self._try_workers(task)
        except MessageTooLarge as error:
            reason = f"The request has {error.size} bytes and exceeds {error.limit}."
            raise ApiError("too_large", reason) from error

    async def _try_workers(self, task: SequenceTask) -> None:
        stream = task.stream
        while True:
            if stream.id in self._suspects:
                await self._isolation.enter(stream)
            asked = self._loop.time()
            routed = await self._route(task)
            task.dispatch.route_s += self._loop.time() - asked
            if routed.prefill is not None:
                if task.dispatch.handoff is None:
                    await self._prefill(task, routed.prefill, routed.needs_handoff)
                self._events.event(task.model, SeqFree(prefill_part(stream.attempt)))
            if routed.needs_handoff and task.dispatch.handoff is None:
                await asyncio.sleep(RETRY_S)
            elif await self._offer(task, routed):
                return
            self._events.event(task.model, SeqFree(stream.attempt))

    async def _route(self, task: SequenceTask) -> Routed:
        state = task.dispatch
        migrating = state.extended is not None
        retry_until: float | None = state.deadline if migrating else None
        retry_s = FIRST_RETRY_S
        task.stream.next_attempt()
        while True:
            if self._waker.is_idle(task.model):
                await self._wait_for_worker(task)
                retry_until = None
            left = state.deadline - self._loop.time()
            if left <= 0:
                text = f"No worker was free in time{_last_word(task)}."
                raise ApiError("timeout", text, retry_after=1.0)
            reply = await self._query_router(task, left)
            if isinstance(reply, Routed):
                state.routed = reply
                if task.stream.counts_cached:
                    state.counted = reply
                state.wait_s += reply.wait_s
                state.index_s += reply.index_s
                return reply
            now = self._loop.time()
            if retry_until is None:
                retry_until = now + self._settings.restart_wait_s
            # the router may have noticed before this frontend that the last worker is lost
            # or its only workers may be changing servers
            returns = self._waker.may_idle(task.model) or bool(self._workers.silent)
            may_retry = now < retry_until or (reply.code == "no_workers" and returns)
            _raise_refusal(reply, task, may_retry)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_S)

    async def _wait_for_worker(self, task: SequenceTask) -> None:
        """Wait for the first worker of an idle model; raises ApiError if none starts in time.

        The wait costs the sequence neither its position in a queue nor its time for a placement.
        """
        state, now = task.dispatch, self._loop.time()
        # the monitor would count the wait as silence of the worker that had the sequence last
        task.stream.lose("no worker is left")
        state.arrived = state.arrived or time.time()
        state.wake_deadline = state.wake_deadline or now + self._settings.wake_timeout_s
        tokens = task.current_prompt.count
        await self._waker.wait(task.model, task.stream.id, tokens, state.wake_deadline)
        state.refused, state.handoff = False, None  # both are of workers that have left
        state.deadline = max(state.deadline, self._loop.time() + self._placement_timeout(task))

    async def _query_router(self, task: SequenceTask, left: float) -> Routed | Refused:
        state = task.dispatch
        routing = (state.migration or task.span).child(names.ROUTE, kind="client")

        def compose(new_attempt: bool, arrived: float | None) -> RouteRequest:
            if new_attempt:
                task.stream.next_attempt()
            state.avoided = [*state.exclude, *self._workers.silent]
            left = state.deadline - self._loop.time()
            return _route_request(task, left, arrived, routing.traceparent)

        arrived, state.arrived = state.arrived, state.arrived or time.time()
        reply = None
        try:
            reply = await self._routes.request(task.model, compose, left, arrived)
            return reply
        except msgspec.MsgspecError as error:
            raise ApiError("internal", f"unreadable reply from a router: {error}") from error
        finally:
            end_route(routing, task, reply)

    async def _prefill(self, task: SequenceTask, rank: RankKey, required: bool) -> None:
        """Have a prefill worker compute the prompt; if it fails, the decode worker computes it.

        If the handoff is `required`, the caller tries again; a refused request is an error.
        """
        stream = task.stream
        prefill = RemotePrefill(task.model, stream, self._loop.time())
        span = prefill.stream.span = task.span.child(names.REMOTE_PREFILL, kind="client")
        describe_attempt(span, task, rank)
        code, work = "done", self._work(task, rank.rank, span)
        try:
            task.dispatch.handoff = await prefill.run(
                self._workers, self._monitor, rank, work, self._settings.prefill_timeout_s
            )
            stream.prefilled(prefill.stream.cached)
            stream.engine_wait_s = prefill.stream.engine_wait_s
        except PrefillFailed as failure:
            code = failure.code
            if required and code == "invalid":
                raise InvalidRequest(f"The engine refused the request: {failure}") from failure
            log.warning(
                "prefill worker %s did not compute the prompt of request %s (%s): %s",
                *(rank.instance, stream.id, code, failure),
            )
            self._blame(stream, prefill.stream, prefill.stream.loss)
        finally:
            stream.earlier_device_s += prefill.stream.device_s
            end_attempt(prefill.stream)
        metrics.prefills.labels(task.model, code).inc()

    async def _offer(self, task: SequenceTask, routed: Routed) -> bool:
        stream, instance, state = task.stream, routed.instance, task.dispatch
        suspected = stream.id in self._suspects
        # before the offer: a crash of the engine may be noticed before the reply is read
        self._suspects.dispatched(stream.id, instance, lambda: stream.fresh_on(instance))
        span = stream.span = task.span.child(names.ATTEMPT, kind="client")
        describe_attempt(span, task, RankKey(instance, routed.rank))
        work = self._work(task, routed.rank, span)
        offered = await self._workers.offer(stream, task.consumer, instance, work, suspected)
        if offered.status == "accepted":
            return True
        end_attempt(stream, offered.status)
        metrics.reroutes.labels(task.model, offered.status).inc()
        if offered.status == "invalid":
            raise InvalidRequest(f"The engine refused the request: {offered.reason}")
        leaves = offered.status == "draining" and not self._waker.may_idle(task.model)
        state.refused = state.refused or offered.status == "busy" or leaves
        state.turned_away = f"{instance}: {offered.reason or offered.status}"
        if offered.status == "silent":
            self._blame(stream, stream, "vanished")
        elif offered.status in ("away", "unloaded"):
            await asyncio.sleep(RETRY_S)
        elif offered.status != "frozen" and instance not in self._workers.silent:
            state.exclude = [*state.exclude, instance]
        return False

    def _blame(self, stream: TokenStream, lost: TokenStream, loss: Loss) -> None:
        """Raise PoisonRequest if two engines were lost, the last one while it ran `lost`.

        `lost` is the request's own `stream` or that of its remote prefill.
        """
        if not loss:
            return
        failed = loss == "failed"
        if self._suspects.lost(stream.id, lost.instance, lost.fresh, failed):
            metrics.poison_requests.inc()
            reason = lost.lost or "the last one did not reply to the offer"
            log.error("request %s is offered to no further worker: %s", stream.id, reason)
            raise PoisonRequest(reason)

    def _work(self, task: SequenceTask, rank: int, span: TraceSpan) -> Work:
        request = task.prepared.request
        return Work(
            request=task.stream.work,
            frontend=self._instance,
            tokens=task.current_prompt.tokens,
            sampling=_sampling(task),
            salt=task.prompt.salt,
            adapter=task.prepared.adapter,
            rank=rank,
            priority=BATCH_PRIORITY if self._is_batch(task) else request.hints.priority,
            generated=len(task.stream.tokens),
            session=request.hints.session,
            conversation=certain_conversation(request.hints),
            turn=request.turn,
            handoff=task.dispatch.handoff,
            tenant=request.cache_salt,
            parent_session=request.hints.parent_session,
            retention=list(task.prompt.retention),
            decode=task.prepared.decode,
            traceparent=span.traceparent,
            ephemeral=request.hints.ephemeral,
            ref=task.stream.ref,
            pooling=task.prompt.pooling,
            images=list(task.prompt.images),
        )

    def _is_batch(self, task: SequenceTask) -> bool:
        return of_class(task.prepared.request.hints, self._batch_classes)

    def _placement_timeout(self, task: SequenceTask) -> float:
        return self._batch_timeout if self._is_batch(task) else self._settings.route_timeout_s

    async def follow(self, task: SequenceTask) -> None:
        """Return when the sequence has ended; raise its error. Migrates it off lost workers."""
        stream = task.stream
        migrations = 0
        while True:
            await stream.ended.wait()
            end_attempt(stream)
            self._workers.inbox.remove(stream)
            if task.prepared.request.thinking_budget is not None:
                task.consumer()  # which may redirect a stream that has come to its end
            if stream.finish is not None:
                break
            self._end_attempt(task)
            if stream.redirected:
                await self._redirect(task)
                continue
            self._blame(stream, stream, stream.loss)
            if migrations == self._settings.migration_limit:
                raise Unavailable(f"The worker was lost: {stream.lost}")
            migrations += 1
            await self._migrate(task)
        self._stop_engine(stream)  # other choices of the request may go on
        if stream.error is not None:
            raise stream.error

    def _end_attempt(self, task: SequenceTask) -> None:
        """Cancel the lost attempt, which may still run, and free its blocks in the routers."""
        self._workers.cancel(task.stream)
        self._events.event(task.model, SeqFree(task.stream.attempt))

    async def _redirect(self, task: SequenceTask) -> None:
        """Go on after the tokens of a stream that were changed, mostly where their KV is."""
        stream = task.stream
        stream.redirected = False
        task.consumer()
        if len(stream.tokens) >= task.prepared.max_tokens:
            stream.stop("length")
            return
        self._extend(task)
        await self._dispatch(task)

    def _extend(self, task: SequenceTask) -> None:
        """Have the prompt continue with the tokens so far, for the next attempt."""
        state, block_size = task.dispatch, task.prepared.model.card.block_size
        state.extended = _extended(task.prompt, task.stream.tokens, block_size)
        state.exclude, state.refused = [], False
        state.handoff = state.wake_deadline = None
        state.deadline = self._loop.time() + self._placement_timeout(task)

    async def _migrate(self, task: SequenceTask) -> None:
        stream, state = task.stream, task.dispatch
        log.warning(
            "request %s migrates off %s after %d tokens: %s",
            *(stream.id, stream.instance, len(stream.tokens), stream.lost),
        )
        metrics.migrations.labels(task.model).inc()
        if len(stream.tokens) >= task.prepared.max_tokens:
            stream.stop("length")
            return
        state.turned_away = f"{stream.instance}: {stream.lost}"
        self._extend(task)
        state.exclude = [stream.instance]
        state.migration = task.span.child(names.MIGRATION)
        try:
            await self._dispatch(task)
        finally:
            state.migration.end()


def _route_request(
    task: SequenceTask, left: float, arrived: float | None, traceparent: str
) -> RouteRequest:
    request = task.prepared.request
    return route_request(
        request,
        task.current_prompt,
        attempt=task.stream.attempt,
        model=task.model,
        adapter=task.prepared.adapter,
        max_tokens=task.prepared.max_tokens,
        deadline_s=left,
        exclude=task.dispatch.avoided,
        explain="routing" in request.extra_fields,
        arrived=arrived,
        traceparent=traceparent,
    )


def _last_word(task: SequenceTask) -> str:
    """The reason why the last worker that was asked did not go on, for the end of an error."""
    said = task.dispatch.turned_away
    return f" (the last one asked, {said})" if said else ""


def _raise_refusal(refused: Refused, task: SequenceTask, may_retry: bool) -> None:
    """Raise the client's error for a refusal, unless the query is to be repeated."""
    after = refused.retry_after_s
    if refused.code == "invalid":
        raise InvalidRequest(refused.reason)
    if refused.code == "overloaded":
        raise Overloaded(refused.reason, after)
    if refused.code == "deadline":
        raise ApiError("timeout", refused.reason + _last_word(task), retry_after=after)
    if refused.code == "no_workers" and task.dispatch.refused:
        raise Overloaded(f"Every worker of `{task.model}` is busy.", after)
    if not may_retry and refused.code != "no_workers":
        raise Unavailable(f"`{task.model}` cannot be served now: {refused.reason}", after)
    if refused.param and not task.dispatch.avoided:
        param = f"nvext.{refused.param}"
        raise InvalidRequest(f"`{param}`: {refused.reason}", param, code="constraint_unmet")
    if not may_retry or (refused.unmet and not task.dispatch.avoided):
        reason = refused.reason + _last_word(task)
        raise Unavailable(f"No worker serves `{task.model}` now: {reason}", after)


def _extended(prompt: PromptTokens, generated: list[int], block_size: int) -> PromptTokens:
    if not generated:
        return prompt
    tokens = prompt.tokens + array("I", generated).tobytes()
    _, sequence_hashes = block_hashes(tokens, block_size, prompt.salt)
    count = prompt.count + len(generated)
    return PromptTokens(
        tokens, count, sequence_hashes, prompt.salt, prompt.retention, images=prompt.images
    )


def _sampling(task: SequenceTask) -> Sampling:
    """Sampling with a seed of its own for each choice of a prompt."""
    request = task.prepared.request
    seed = request.sampling.seed
    return msgspec.structs.replace(
        request.sampling,
        max_tokens=task.prepared.max_tokens,
        guided=task.prepared.guided,
        seed=None if seed is None else seed + task.index % request.n,
    )
