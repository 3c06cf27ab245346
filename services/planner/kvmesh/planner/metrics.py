"""Metrics of a planner process, prefixed `kvmesh_planner_`."""

from prometheus_client import Counter, Gauge

from kvmesh.bus.messages import ScalingDecision

_PREFIX = "kvmesh_planner"
_POOL = ["model", "pool"]

leader = Gauge(f"{_PREFIX}_leader", "1 in the planner that decides, 0 in one that stands by")
decisions = Counter(f"{_PREFIX}_decisions", "Decisions, by whether they changed a pool",
                    ["model", "changed"])  # fmt: skip
ready = Gauge(f"{_PREFIX}_ready_workers", "Workers that take requests", _POOL)
starting = Gauge(f"{_PREFIX}_starting_workers", "Workers that are starting", _POOL)
wanted = Gauge(f"{_PREFIX}_wanted_workers", "Workers that should run", _POOL)
startup = Gauge(f"{_PREFIX}_startup_seconds", "Learned start-up time of a worker", _POOL)
failed = Gauge(f"{_PREFIX}_failed_starts", "Workers given up since they never became ready", _POOL)
arrivals = Gauge(f"{_PREFIX}_arrivals_per_second", "Accepted requests per second now", ["model"])
forecast = Gauge(
    f"{_PREFIX}_forecast_per_second",
    "Requests per second expected when workers started now are ready",
    ["model"],
)
kept = Gauge(
    f"{_PREFIX}_promise_kept_ratio",
    "Share of the latest requests that kept a promise",
    ["model", "promise"],
)
role_switches = Counter(
    f"{_PREFIX}_role_switches",
    "Workers asked to change their role to that of a pool, by whether they did",
    ["model", "pool", "result"],
)
promotions = Counter(
    f"{_PREFIX}_promotions",
    "Parked workers that were told to serve, by whether they accepted it",
    ["model", "pool", "result"],
)
sleeps = Counter(
    f"{_PREFIX}_sleeps",
    "Workers that were told to sleep, by whether they accepted it",
    ["model", "pool", "result"],
)
connector_errors = Counter(
    f"{_PREFIX}_connector_errors", "Changes of the fleet that the connector could not make"
)


def observe(decision: ScalingDecision) -> None:
    """Set the gauges of one model and count the decision."""
    model = decision.model
    decisions.labels(model, str(decision.changed).lower()).inc()
    for name, pool in decision.pools.items():
        ready.labels(model, name).set(pool.ready)
        starting.labels(model, name).set(pool.starting)
        wanted.labels(model, name).set(pool.wanted)
        startup.labels(model, name).set(pool.startup_s)
        failed.labels(model, name).set(pool.failed)
    arrivals.labels(model).set(decision.signals.get("arrivals_per_s", 0.0))
    forecast.labels(model).set(decision.signals.get("forecast_per_s", 0.0))
    for promise, share in decision.kept.items():
        kept.labels(model, promise).set(share)
