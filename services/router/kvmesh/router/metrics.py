"""Metrics of a router process, prefixed `kvmesh_router_`."""

from prometheus_client import Counter, Gauge, Histogram

from kvmesh.bus.messages import Decision
from kvmesh.hashing import HASH_BYTES
from kvmesh.returns.forecaster import ReturnForecaster
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.policies.admission import AgentAdmission
from kvmesh.router.waiting.queue import PlacementQueue

_FAST = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0)
_SLOW = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PREFIX = "kvmesh_router"
_SAME = "the same in each router"

decisions = Counter(f"{_PREFIX}_decisions", "Requests placed", ["model", "policy"])
refusals = Counter(f"{_PREFIX}_refusals", "Requests refused", ["model", "code"])
failures = Counter(
    f"{_PREFIX}_policy_failures",
    "Failed calls of a policy; kv makes its choices instead",
    ["model", "policy"],
)
core_seconds = Histogram(
    f"{_PREFIX}_core_seconds", "Time of one decision in the core", ["model"], buckets=_FAST
)
index_seconds = Histogram(
    f"{_PREFIX}_index_seconds", "Time of one index query", ["model"], buckets=_FAST
)
wait_seconds = Histogram(
    f"{_PREFIX}_queue_wait_seconds", "Time in the queue", ["model"], buckets=_SLOW
)
prefix_waits = Histogram(
    f"{_PREFIX}_prefix_wait_seconds",
    "Waits for a request that computed the same prefix: it did (computed), took longer than another"
    " rank would have (late), or ended before (lost)",
    ["model", "end"],
    buckets=_SLOW,
)
index_failures = Counter(f"{_PREFIX}_index_failures", "Index queries without a reply", ["model"])
prompt_blocks = Counter(f"{_PREFIX}_prompt_blocks", "Blocks of placed prompts", ["model"])
overlap_blocks = Counter(
    f"{_PREFIX}_overlap_blocks", "Blocks of placed prompts held by the chosen rank", ["model"]
)
missed_blocks = Counter(
    f"{_PREFIX}_missed_overlap_blocks",
    "Blocks by which the best recorded candidate overlapped more",
    ["model"],
)
forecasts = Counter(
    f"{_PREFIX}_forecasts",
    "Forecasts of returns sent, one for each prompt to each kvbm of its node",
    ["model"],
)
forecast_withdrawals = Counter(
    f"{_PREFIX}_forecast_withdrawals",
    "Forecasts withdrawn from kvbms, as the session went on elsewhere",
    ["model"],
)
forecast_returns = Gauge(
    f"{_PREFIX}_forecast_returns",
    f"Returns of prompts within an age, expected by forecasts and observed: {_SAME}",
    ["model", "within_s", "kind"],
)
agents = Gauge(
    f"{_PREFIX}_agents",
    "Agents by state: active, about the same in each router, or resting with a request here",
    ["model", "state"],
)
agent_window = Gauge(
    f"{_PREFIX}_agent_window",
    f"Share of the ranks' memory for contexts of active agents, none without a limit: {_SAME}",
    ["model"],
)
agent_rests = Counter(
    f"{_PREFIX}_agent_rests",
    "Rests of agents with a request, by what ended them: room, deadline, or share of the owner",
    ["model", "end"],
)
adapter_loads = Counter(
    f"{_PREFIX}_adapter_loads",
    "Loads of adapters that this router ordered: loaded, no room, or failed",
    ["model", "end"],
)
lost = Counter(f"{_PREFIX}_lost_sequences", "Active requests given up as lost", ["model"])
ranks = Gauge(f"{_PREFIX}_ranks", f"Known data-parallel ranks: {_SAME}", ["model"])
incompatible = Gauge(
    f"{_PREFIX}_incompatible_workers",
    f"Workers left out as incompatible with others of their model: {_SAME}",
    ["model"],
)
slowness = Gauge(
    f"{_PREFIX}_slowness",
    f"Time of a rank for the same work relative to the others, if an outlier: {_SAME}",
    ["model", "worker", "rank"],
)
rank_speed = Gauge(
    f"{_PREFIX}_rank_speed",
    f"Work of a rank in a given time relative to the median rank, missing if idle lately: {_SAME}",
    ["model", "worker", "rank"],
)
learner_gain = Gauge(
    f"{_PREFIX}_learner_gain",
    f"Gain of a learner over its fallback, as a share of the fallback's figure: {_SAME}",
    ["model", "learner"],
)
learner_on = Gauge(
    f"{_PREFIX}_learner_on",
    f"1 if what was learned decides now, 0 if the fallback does: {_SAME}",
    ["model", "learner"],
)
active_requests = Gauge(
    f"{_PREFIX}_active_requests",
    f"Tracked active requests of all routers: {_SAME}",
    ["model"],
)
queued = Gauge(
    f"{_PREFIX}_queue_requests",
    f"Waiting requests in the queues of all routers: {_SAME}",
    ["model"],
)
queued_tokens = Gauge(
    f"{_PREFIX}_queue_tokens",
    f"Uncached tokens of the waiting requests of all routers: {_SAME}",
    ["model"],
)


class RouterModelMetrics:
    """The series of one model, bound once: a label lookup costs more than counting."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.core_seconds = core_seconds.labels(model)
        self.index_seconds = index_seconds.labels(model)
        self.index_failures = index_failures.labels(model)
        self.lost = lost.labels(model)
        self.forecasts = forecasts.labels(model)
        self.withdrawals = forecast_withdrawals.labels(model)
        self._wait = wait_seconds.labels(model)
        self._prompt = prompt_blocks.labels(model)
        self._overlap = overlap_blocks.labels(model)
        self._missed = missed_blocks.labels(model)
        self._by_policy: dict[str, Counter] = {}
        self._slow: set[tuple[str, str, str]] = set()
        self._measured: set[tuple[str, str, str]] = set()
        self._failures: dict[str, int] = {}
        self._rests: dict[str, int] = {}

    def observe_placement(self, decision: Decision) -> None:
        """Count one placement."""
        counter = self._by_policy.get(decision.policy)
        if counter is None:
            counter = self._by_policy[decision.policy] = decisions.labels(
                self._model, decision.policy
            )
        counter.inc()
        cached = sum(decision.chosen.overlap)
        self._wait.observe(decision.wait_s)
        for wait in decision.prefix_waits:
            prefix_waits.labels(self._model, wait.end).observe(wait.seconds)
        self._prompt.inc(len(decision.sequence_hashes) // HASH_BYTES)
        self._overlap.inc(cached)
        best = max((sum(c.overlap) for c in decision.candidates), default=cached)
        self._missed.inc(max(best - cached, 0))

    def set_levels(self, queue: PlacementQueue) -> None:
        """Set the gauges."""
        core = queue.core
        ranks.labels(self._model).set(len(core.table.slot_of))
        incompatible.labels(self._model).set(len(core.table.incompatible))
        active_requests.labels(self._model).set(len(core.active))
        queued.labels(self._model).set(queue.waiting)
        queued_tokens.labels(self._model).set(queue.waiting_tokens)
        self._slowness(core)
        self._speeds(core)
        for report in core.learning.reports(core.model):
            learner_gain.labels(self._model, report.learner).set(report.gain)
            learner_on.labels(self._model, report.learner).set(report.on)
        if isinstance(core.policies.default, AgentAdmission):
            self._admission(core.policies.default)
        if core.learning.returns is not None:
            self._returns(core.learning.returns)
        for policy, count in core.policies.failures.items():
            failures.labels(self._model, policy).inc(count - self._failures.get(policy, 0))
            self._failures[policy] = count

    def _admission(self, admission: AgentAdmission) -> None:
        agents.labels(self._model, "active").set(admission.active)
        agents.labels(self._model, "resting").set(len(admission.waiting))
        agent_window.labels(self._model).set(admission.window.share)
        for end, count in admission.rests.items():
            agent_rests.labels(self._model, end).inc(count - self._rests.get(end, 0))
            self._rests[end] = count

    def _returns(self, returns: ReturnForecaster) -> None:
        for each in returns.curves.calibrations:
            within = f"{each.within_s:g}"
            forecast_returns.labels(self._model, within, "expected").set(each.expected)
            forecast_returns.labels(self._model, within, "observed").set(each.observed)

    def _slowness(self, core: RouterCore) -> None:
        outliers = {}
        for slot, value in core.speeds.outliers.items():
            _, worker, rank = core.table.ranks[slot]
            outliers[self._model, worker, str(rank)] = value
        for labels in self._slow - outliers.keys():
            slowness.remove(*labels)
        for labels, value in outliers.items():
            slowness.labels(*labels).set(value)
        self._slow = set(outliers)

    def _speeds(self, core: RouterCore) -> None:
        measured = {}
        for slot, (speed, _) in core.speeds.measured.items():
            _, worker, rank = core.table.ranks[slot]
            measured[self._model, worker, str(rank)] = speed
        for labels in self._measured - measured.keys():
            rank_speed.remove(*labels)
        for labels, speed in measured.items():
            rank_speed.labels(*labels).set(speed)
        self._measured = set(measured)
