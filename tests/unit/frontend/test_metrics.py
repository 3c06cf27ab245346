"""Prometheus series of a frontend."""

from prometheus_client import REGISTRY

from kvmesh.frontend.metrics import FrontendModelMetrics

MODEL = "of-test-metrics"


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model": MODEL, **labels})


def test_cached_tokens_are_counted_by_tier() -> None:
    metrics = FrontendModelMetrics(MODEL)

    def tiers() -> list[float | None]:
        name = "kvmesh_frontend_tier_cached_tokens_total"
        return [value(name, tier=str(tier)) for tier in range(4)]

    assert tiers() == [0, 0, 0, 0]
    metrics.count_cached([])
    metrics.count_cached([16])
    metrics.count_cached([16, 32, 0, 8])
    assert tiers() == [32, 32, 0, 8]
    assert value("kvmesh_frontend_cached_tokens_total") == 72


def test_moving_prompts_are_counted_from_zero_on() -> None:
    FrontendModelMetrics(MODEL)
    name = "kvmesh_frontend_moving_prompts_total"
    parts = ("system", "tool", "message", "prompt")
    assert [value(name, part=part) for part in parts] == [0, 0, 0, 0]
