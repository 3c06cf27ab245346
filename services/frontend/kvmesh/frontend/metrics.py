"""Prometheus metrics of the frontend, and the latest load of every worker."""

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
    "kvmesh_frontend_cached_tokens", "Prompt tokens that no engine had to compute", ["model"]
)
output_tokens = Counter("kvmesh_frontend_output_tokens", "Tokens generated", ["model"])
migrations = Counter(
    "kvmesh_frontend_migrations", "Requests moved off a lost worker, tokens included", ["model"]
)
reroutes = Counter(
    "kvmesh_frontend_reroutes", "Placements that a worker did not take", ["model", "reason"]
)
asked_again = Counter(
    "kvmesh_frontend_router_moves",
    "Questions moved off a router that was silent or gone",
    ["model"],
)
silent_routers = Counter(
    "kvmesh_frontend_silent_routers", "Times that a router did not answer and was left out"
)
culprits = Counter(
    "kvmesh_frontend_culprits", "Requests over which two engines were lost, and no third one"
)
prefills = Counter(
    "kvmesh_frontend_prefills",
    "Prompts given to prefill workers; what was not done was computed where it went on",
    ["model", "result"],
)
rejections = Counter("kvmesh_frontend_rejections", "Requests refused", ["reason"])
cancellations = Counter("kvmesh_frontend_cancellations", "Requests that a client left", ["model"])
resends = Counter("kvmesh_frontend_resends", "Times that lost tokens were asked for again")
unstored = Counter("kvmesh_frontend_unstored_responses", "Responses that could not be stored")
directives = Counter(
    "kvmesh_frontend_retention_directives",
    "What came of the directives of requests when they began",
    ["model", "outcome"],
)
speculative = Counter(
    "kvmesh_frontend_speculative_tokens",
    "Tokens asked to be computed ahead of a turn, which then found them or did not",
    ["model", "result"],
)


class FrontendModelMetrics:
    """The metrics of one model, their labels resolved once."""

    def __init__(self, model: str) -> None:
        self.ttft = ttft.labels(model)
        self.itl = itl.labels(model)
        self.duration = duration.labels(model)
        self.prompt_tokens = prompt_tokens.labels(model)
        self.cached_tokens = cached_tokens.labels(model)
        self.output_tokens = output_tokens.labels(model)


LOAD_GAUGES = {
    "running": "kvmesh_worker_running_requests",
    "waiting": "kvmesh_worker_waiting_requests",
    "active_blocks": "kvmesh_worker_active_blocks",
    "cached_blocks": "kvmesh_worker_cached_blocks",
    "total_blocks": "kvmesh_worker_total_blocks",
    "prefill_tokens": "kvmesh_worker_prefill_tokens",
    "step_s": "kvmesh_worker_step_seconds",
    "requests": "kvmesh_worker_requests",
    "steps": "kvmesh_worker_steps",
    "prompt_tokens": "kvmesh_worker_prompt_tokens",
    "cached_tokens": "kvmesh_worker_cached_tokens",
    "output_tokens": "kvmesh_worker_output_tokens",
    "preemptions": "kvmesh_worker_preemptions",
    "aborted": "kvmesh_worker_aborted_requests",
}


class Loads(Collector):
    """The newest `Load` of every live rank, exported as gauges labelled by worker and rank."""

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
                name, f"`{field}` as its worker last stated it", labels=labels
            )
            for (instance, rank), load in self._latest.items():
                worker = self._names[instance]
                family.add_metric([worker, instance, str(rank)], float(getattr(load, field)))
            yield family
