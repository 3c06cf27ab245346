"""Report of a sequence that has ended: its outcome for routers, and metrics."""

import asyncio
import time

from kvmesh.bus.messages import Outcome
from kvmesh.frontend import metrics
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.dispatch.task import SequenceTask
from kvmesh.frontend.generation.accounts import account_of, count_tokens
from kvmesh.frontend.generation.awaited import AnswerCalls, waits_for
from kvmesh.frontend.generation.cache_expectations import CacheExpectations
from kvmesh.frontend.generation.nvext import all_outcomes
from kvmesh.frontend.preprocess.conversation_key import conversation_name
from kvmesh.frontend.tenant_figures import TenantUse
from kvmesh.placement_rules.served import expected_tokens


class OutcomeReporter:
    """Reports each dispatched sequence once, at its end."""

    def __init__(self, events: SequenceEventPublisher, expectations: CacheExpectations) -> None:
        self._events = events
        self._expectations = expectations

    def report(
        self, task: SequenceTask, started: float, calls: AnswerCalls, key_tenant: str | None
    ) -> None:
        """Publish and count; `started` is the request's arrival on the loop's clock.

        `key_tenant` is the tenant of the caller's key. An answer with tool `calls` that stops
        finishes with "tool_calls".
        """
        now, stream = asyncio.get_running_loop().time(), task.stream
        account = account_of(task)
        if account is not None:
            count_tokens(task.prepared.model.metrics, account)
        request, dispatch = task.prepared.request, task.dispatch
        first, cached = stream.first_token_at, sum(stream.cached or [])
        finish = stream.finish or "cancelled"
        if finish == "stop" and calls:
            finish = "tool_calls"
        self._events.outcome(
            task.model,
            Outcome(
                request=stream.attempt,
                instance=stream.instance,
                time=time.time(),
                cached_tokens=cached,
                output_tokens=len(stream.tokens),
                ttft_s=None if first is None else first - started,
                total_s=now - started,
                finish=finish,
                ahead=task.prepared.computed_ahead(cached),
                cached_tiers=stream.cached or [],
                cache=account,
                model=request.target or request.model,
                tenant=request.tenant_name,
                key=request.key_name,
                session=request.hints.session or "",
                client=request.client_id,
                choice=task.index,
                prompt_tokens=0 if task.index % request.n else task.prompt.count,
                attempts=stream.attempts,
                device_s=stream.device_s + stream.earlier_device_s,
                prepare_s=dispatch.began - started,
                route_s=dispatch.route_s,
                wait_s=dispatch.wait_s,
                index_s=dispatch.index_s,
                engine_wait_s=stream.engine_wait_s,
                agent=request.agent,
                waits_for=waits_for(request, finish, calls),
                shown=task.prepared.shown if task.index == 0 else None,
                conversation=conversation_name(request.hints.conversation),
                forked_from=request.hints.forked_from or "",
                load_test=request.hints.load_test,
                alias=request.model if request.target else "",
                shadow=request.shadow,
            ),
        )
        _measure(task, started, now)
        if not request.shadow:
            _count_use(task, key_tenant, now)
        self._compare(task)
        for outcome in all_outcomes(task):
            metrics.retention_directives.labels(task.model, outcome).inc()

    def _compare(self, task: SequenceTask) -> None:
        """Compare expected and found cached tokens of a sequence that has not migrated."""
        stream, routed = task.stream, task.dispatch.routed
        if stream.attempts != 1 or stream.cached is None:
            return
        if routed is not None and routed.prefill is None:
            size = task.prepared.model.card.block_size
            overlap, count, possible = routed.overlap, task.prompt.count, routed.possible
            expected = sum(expected_tokens(overlap, size, count))
            announced = None if possible is None else possible.chosen
            known = expected_tokens(overlap, size, count, announced)
            self._expectations.add(task.model, stream.instance, expected, known, stream.cached)


def _measure(task: SequenceTask, started: float, now: float) -> None:
    stream, model_metrics = task.stream, task.prepared.model.metrics
    if stream.first_token_at is None:
        return
    count = len(stream.tokens)
    exemplar = _exemplar(task)
    model_metrics.ttft.observe(stream.first_token_at - started, exemplar)
    model_metrics.duration.observe(now - started, exemplar)
    if count > 1:
        model_metrics.itl.observe((now - stream.first_token_at) / (count - 1), exemplar)
    model_metrics.count_cached(stream.cached or [])
    model_metrics.output_tokens.inc(count)


def _exemplar(task: SequenceTask) -> dict[str, str] | None:
    """The exemplar of a request with a sampled trace."""
    span = task.prepared.request.span
    return {"trace_id": span.trace.id} if span and span.trace.sampled else None


def _count_use(task: SequenceTask, key_tenant: str | None, now: float) -> None:
    """Count a sequence's tokens and time in queues; its prompt counts once per request."""
    stream = task.stream
    use = TenantUse(
        prompt_tokens=task.prepared.prompt_tokens if task.index == 0 else 0,
        cached_tokens=sum(stream.cached or []),
        output_tokens=len(stream.tokens),
        queue_seconds=task.dispatch.wait_s,
    )
    metrics.tenants.add(key_tenant, task.model, use, now)
