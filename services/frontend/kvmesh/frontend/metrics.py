"""Prometheus metrics of the frontend, and the latest load of every worker rank."""

from collections.abc import Iterable

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.bus.messages import Instance, Load

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

requests = Counter("kvmesh_frontend_requests", "Requests answered", ["api", "model", "status"])
active = Gauge("kvmesh_frontend_active_requests", "Requests being served now")
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
    "kvmesh_frontend_cached_tokens", "Prompt tokens read from a cache", ["model"]
)
output_tokens = Counter("kvmesh_frontend_output_tokens", "Tokens generated", ["model"])
migrations = Counter(
    "kvmesh_frontend_migrations", "Sequences continued on another worker after a loss", ["model"]
)
reroutes = Counter(
    "kvmesh_frontend_reroutes",
    "Dispatches that a worker refused or did not accept",
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


class FrontendModelMetrics:
    """The metrics of one model, with resolved labels."""

    def __init__(self, model: str) -> None:
        self.ttft = ttft.labels(model)
        self.itl = itl.labels(model)
        self.duration = duration.labels(model)
        self.prompt_tokens = prompt_tokens.labels(model)
        self.cached_tokens = cached_tokens.labels(model)
        self.output_tokens = output_tokens.labels(model)


LOAD_GAUGES = {
    "running": "kvmesh_mesh_worker_running_requests",
    "waiting": "kvmesh_mesh_worker_waiting_requests",
    "active_blocks": "kvmesh_mesh_worker_active_blocks",
    "cached_blocks": "kvmesh_mesh_worker_cached_blocks",
    "total_blocks": "kvmesh_mesh_worker_total_blocks",
    "prefill_tokens": "kvmesh_mesh_worker_prefill_tokens",
    "step_s": "kvmesh_mesh_worker_step_seconds",
    "requests": "kvmesh_mesh_worker_requests",
    "steps": "kvmesh_mesh_worker_steps",
    "prompt_tokens": "kvmesh_mesh_worker_prompt_tokens",
    "cached_tokens": "kvmesh_mesh_worker_cached_tokens",
    "output_tokens": "kvmesh_mesh_worker_output_tokens",
    "preemptions": "kvmesh_mesh_worker_preemptions",
    "aborted": "kvmesh_mesh_worker_aborted_requests",
}


class WorkerLoads(Collector):
    """The newest `Load` of every live rank, as gauges `kvmesh_mesh_worker_*`.

    Workers export the same figures as `kvmesh_worker_*`; the names differ so that a sum over all
    scraped processes counts each figure once.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[str, int], Load] = {}
        self._names: dict[str, str] = {}

    def receive(self, load: Load) -> None:
        if load.instance in self._names:
            self._latest[load.instance, load.rank] = load

    def joined(self, card: Instance) -> None:
        self._names[card.instance] = card.name

    def left(self, card: Instance) -> None:
        self._names.pop(card.instance, None)
        for key in [key for key in self._latest if key[0] == card.instance]:
            del self._latest[key]

    def collect(self) -> Iterable[Metric]:
        labels = ["worker", "instance", "rank"]
        for field, name in LOAD_GAUGES.items():
            family = GaugeMetricFamily(
                name, f"`{field}` of the rank's last load report", labels=labels
            )
            for (instance, rank), load in self._latest.items():
                worker = self._names[instance]
                family.add_metric([worker, instance, str(rank)], float(getattr(load, field)))
            yield family
