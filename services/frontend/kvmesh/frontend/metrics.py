"""Prometheus metrics of the frontend."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.bus.messages import LOSS_REASONS
from kvmesh.frontend.tenant_figures import TenantFigures, TenantUse
from kvmesh.index import TIERS
from kvmesh.placement_rules.served import ServedTokens

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

requests = Counter(
    "kvmesh_frontend_requests",
    "Requests answered; status 499: the client left before the answer",
    ["api", "model", "status"],
)
active = Gauge("kvmesh_frontend_active_requests", "Requests being served now")
websockets = Gauge("kvmesh_frontend_websockets", "Open WebSockets")
batches = Gauge("kvmesh_frontend_batches", "Batches that this frontend executes")
batch_requests = Counter(
    "kvmesh_frontend_batch_requests",
    "Requests of batches that were executed: succeeded, errored",
    ["outcome"],
)
WAITING, GENERATING = "waiting", "generating"
running = Gauge(
    "kvmesh_frontend_model_requests",
    "Requests being served now, by whether their first token has arrived: waiting, generating",
    ["model", "phase"],
)
ttft = Histogram(
    "kvmesh_frontend_ttft_seconds", "Arrival to first token", ["model"], buckets=SECONDS
)
itl = Histogram(
    "kvmesh_frontend_itl_seconds",
    "Mean time between tokens of a request",
    ["model"],
    buckets=SECONDS,
)
duration = Histogram(
    "kvmesh_frontend_request_seconds", "Arrival to last token", ["model"], buckets=SECONDS
)
prompt_tokens = Counter("kvmesh_frontend_prompt_tokens", "Tokens of prompts", ["model"])
cached_tokens = Counter(
    "kvmesh_frontend_cached_tokens",
    "Prompt tokens that no engine had to compute, as they were cached",
    ["model"],
)
tier_cached_tokens = Counter(
    "kvmesh_frontend_tier_cached_tokens",
    "Cached prompt tokens by the tier that had them",
    ["model", "tier"],
)
output_tokens = Counter("kvmesh_frontend_output_tokens", "Tokens generated", ["model"])
migrations = Counter(
    "kvmesh_frontend_migrations", "Sequences continued on another worker after a loss", ["model"]
)
shadow_requests = Counter(
    "kvmesh_frontend_shadow_requests",
    "Copies of requests for the shadows of an alias: answered, failed, or skipped for want of room",
    ["model", "outcome"],
)
tool_events = Counter(
    "kvmesh_frontend_tool_events", "Reports of harnesses on the tools of their sessions", ["event"]
)
reroutes = Counter(
    "kvmesh_frontend_reroutes",
    "Dispatches that a worker did not accept; away: this frontend had lost its connection;"
    " absent: no process listened",
    ["model", "reason"],
)
route_retries = Counter(
    "kvmesh_frontend_route_retries",
    "Routing requests sent again because a router did not reply or has left",
    ["model"],
)
router_timeouts = Counter(
    "kvmesh_frontend_router_timeouts", "Times that a router did not reply and was suspended"
)
poison_requests = Counter(
    "kvmesh_frontend_poison_requests", "Requests failed because two engines were lost serving them"
)
live_workers = Gauge(
    "kvmesh_frontend_live_workers",
    "Compatible workers with a lease, as this frontend sees them",
    ["model"],
)
waking = Gauge(
    "kvmesh_frontend_waking_sequences",
    "Sequences that wait for a worker of an idle model",
    ["model"],
)
prefills = Counter(
    "kvmesh_frontend_prefills",
    "Prompts dispatched to prefill workers; failed ones are computed by the decode worker",
    ["model", "result"],
)
rejections = Counter("kvmesh_frontend_rejections", "Requests answered with an error", ["reason"])
cancellations = Counter(
    "kvmesh_frontend_cancellations", "Requests cancelled by their client", ["model"]
)
resends = Counter("kvmesh_frontend_resends", "Requests to workers to resend lost tokens")
unstored_responses = Counter(
    "kvmesh_frontend_unstored_responses", "Responses that could not be stored"
)
restored_answers = Counter(
    "kvmesh_frontend_restored_answers",
    "Answers that prompts show as they were generated, by how clients returned them",
    ["model", "returned"],
)
read_answers = Counter(
    "kvmesh_frontend_read_answers", "Generated answers read from the bucket of all frontends"
)
answers_bytes = Gauge("kvmesh_frontend_answers_bytes", "Memory for generated answers")
retention_directives = Counter(
    "kvmesh_frontend_retention_directives",
    "Retention directives by outcome at the start of their request",
    ["model", "outcome"],
)
prompt_cache_tokens = Counter(
    "kvmesh_frontend_prompt_cache_tokens",
    "Prompt tokens by account: reused (own, ahead, shared), lost by reason, and new",
    ["model", "class", "reason"],
)
possible_tokens = Counter(
    "kvmesh_frontend_possible_tokens",
    "Prompt tokens that an endless cache would have held",
    ["model"],
)
moving_prompts = Counter(
    "kvmesh_frontend_moving_prompts",
    "Requests of sessions whose prompt changes every turn, by the part that changes",
    ["model", "part"],
)
speculative_tokens = Counter(
    "kvmesh_frontend_speculative_tokens",
    "Tokens of speculative prefills, by whether the next turn used them",
    ["model", "result"],
)


REUSED = ("own", "ahead", "shared")
PARTS = ("system", "tool", "message", "thinking", "prompt")  # of `PromptChange`


class FrontendModelMetrics:
    """The metrics of one model, with resolved labels."""

    def __init__(self, model: str) -> None:
        self.ttft = ttft.labels(model)
        self.itl = itl.labels(model)
        self.duration = duration.labels(model)
        self.waiting = running.labels(model, WAITING)
        self.generating = running.labels(model, GENERATING)
        self.prompt_tokens = prompt_tokens.labels(model)
        self.cached_tokens = cached_tokens.labels(model)
        self.tier_cached_tokens = [tier_cached_tokens.labels(model, str(n)) for n in range(TIERS)]
        self.output_tokens = output_tokens.labels(model)
        self.possible_tokens = possible_tokens.labels(model)
        tokens = prompt_cache_tokens.labels
        self.reused_tokens = {kind: tokens(model, "reused", kind) for kind in REUSED}
        self.lost_tokens = {reason: tokens(model, "lost", reason) for reason in LOSS_REASONS}
        self.lost_otherwise = tokens(model, "lost", "other")
        self.new_tokens = tokens(model, "new", "")
        # from now on at 0: a rate would miss the first event of a series that begins with it
        for counter in (migrations, route_retries, cancellations):
            counter.labels(model)
        for result in ("useful", "wasted"):
            speculative_tokens.labels(model, result)
        for part in PARTS:
            moving_prompts.labels(model, part)

    def count_cached(self, tokens: Sequence[int]) -> None:
        """Count the cached tokens of a prompt, by tier."""
        if not any(tokens):
            return
        self.cached_tokens.inc(sum(tokens))
        for tier, count in zip(self.tier_cached_tokens, tokens, strict=False):
            tier.inc(count)


class ServedCollector(Collector):
    """Cached tokens that the index knew of each worker, and those that its engine served.

    `totals` returns a model, a worker and its tokens, for each worker.
    """

    def __init__(self, totals: Callable[[], Iterable[tuple[str, str, ServedTokens]]]) -> None:
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "worker", "tier"]
        expected = CounterMetricFamily(
            "kvmesh_frontend_expected_cached_tokens",
            "Cached prompt tokens that the index knew of a worker when it was chosen, by tier",
            labels=labels,
        )
        served = CounterMetricFamily(
            "kvmesh_frontend_served_cached_tokens",
            "Cached prompt tokens that a worker's engine served, by tier",
            labels=labels,
        )
        for model, worker, total in self._totals():
            for tier in range(TIERS):
                expected.add_metric([model, worker, str(tier)], _at(total.expected, tier))
                served.add_metric([model, worker, str(tier)], _at(total.served, tier))
        yield from (expected, served)


def _at(tokens: Sequence[int], tier: int) -> int:
    return tokens[tier] if tier < len(tokens) else 0


_TENANT_FAMILIES = {
    "requests": "Requests answered, by tenant",
    "errors": "Requests answered with an error, before or during the stream, by tenant",
    "prompt_tokens": "Tokens of prompts, by tenant",
    "cached_tokens": "Prompt tokens read from a cache, by tenant",
    "output_tokens": "Tokens generated, by tenant",
    "queue_seconds": "Seconds in the queues of routers, by tenant",
}


class TenantCollector(Collector):
    """The use of the busiest tenants, as `kvmesh_frontend_tenant_*`; counts nothing until begun."""

    def __init__(self) -> None:
        self._figures: TenantFigures | None = None

    def begin(self, limit: int) -> None:
        """Count from now on, with at most `limit` tenants by name; 0 counts nothing."""
        self._figures = TenantFigures(limit) if limit else None

    def add(self, tenant: str | None, model: str, use: TenantUse, now: float) -> None:
        """Count a use of the tenant; `now` is monotonic."""
        if self._figures is not None:
            self._figures.add(tenant, model, use, now)

    def collect(self) -> Iterable[Metric]:
        series = [] if self._figures is None else list(self._figures.series())
        for field, text in _TENANT_FAMILIES.items():
            name = f"kvmesh_frontend_tenant_{field}"
            family = CounterMetricFamily(name, text, labels=["tenant", "model"])
            for tenant, model, use in series:
                family.add_metric([tenant, model], getattr(use, field))
            yield family


tenants = TenantCollector()
