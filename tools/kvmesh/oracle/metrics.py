"""Metrics of an oracle process, prefixed `kvmesh_oracle_`."""

from prometheus_client import Counter, Gauge, Histogram

_PREFIX = "kvmesh_oracle"

answers = Counter(f"{_PREFIX}_answers", "Answers, by result: simulated, busy, error", ["result"])
fleets = Counter(f"{_PREFIX}_simulated_fleets", "Fleets simulated")
seconds = Histogram(
    f"{_PREFIX}_answer_seconds",
    "Time from a question to its answer, where fleets were simulated",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100),
)
window = Gauge(f"{_PREFIX}_window_requests", "Ended requests in the window")
