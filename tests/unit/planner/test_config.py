"""Options from the settings and from the values set at run time."""

from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmesh.planner.config import plan_options, pools_of, with_changes
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.core.promises import Promise
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.settings.schema import PlannerSettings


def test_the_defaults_of_settings_and_options_agree() -> None:
    options, pools = plan_options(PlannerSettings())
    assert options == PlanOptions()
    assert pools == [Pool("workers")]


def test_all_promises_are_read() -> None:
    settings = PlannerSettings(ttft=["p95=2s"], itl=["batch:p50=1s"], queue=["p90=3s"])
    assert plan_options(settings)[0].promises == [
        Promise("ttft", 0.95, 2.0),
        Promise("itl", 0.5, 1.0, "", "batch"),
        Promise("queue", 0.9, 3.0),
    ]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"pools": []}, "no pool is given"),
        ({"pools": ["p:serves=prefill"]}, "at least one pool must decode"),
        ({"pools": ["a:min=2,devices=4"], "max_devices": 7}, "below the 8 devices"),
        ({"pools": ["a:profile=none.npz"]}, "pool a: none.npz is not a performance profile"),
        ({"pools": ["a:profile=b200"]}, "pool a: b200 is not a performance profile"),
        ({"predictor": "oracle"}, "planner.predictor: unknown predictor oracle"),
        ({"ttft": ["p95"]}, "ttft 'p95'"),
        ({"startup_s": inf}, "planner.startup_s must be finite"),
        ({"window_s": inf}, "planner.window_s must be finite"),
        ({"interval_s": inf}, "planner.interval_s must be finite"),
    ],
)
def test_a_mistake_is_named(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlannerConfigError) as caught:
        plan_options(PlannerSettings(**values))
    assert reason in str(caught.value)


def test_values_set_at_run_time_replace_those_of_the_settings() -> None:
    settings = PlannerSettings(ttft=["p95=2s"], compose_file=Path("compose.yaml"), max_devices=4)
    changed = with_changes(settings, {"up_cooldown_s": "3", "ttft": ["p90=1s"], "pools": ["a"]})
    assert changed == msgspec.structs.replace(
        settings, up_cooldown_s=3.0, ttft=["p90=1s"], pools=["a"]
    )
    assert with_changes(settings, {"max_devices": None}).max_devices is None
    assert with_changes(settings, {}) == settings


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"connector": "command"}, "connector cannot be set at run time; these can: pools"),
        ({"nonsense": 1}, "nonsense cannot be set at run time"),
        ({"max_devices": 0}, "planner.max_devices: Expected `int` >= 1"),
        ({"up_cooldown_s": "nan"}, "planner.up_cooldown_s: "),
        ({"down_cooldown_s": "soon"}, "planner.down_cooldown_s: "),
        ({"ttft": "p95=2s"}, "planner.ttft: Expected `array`"),
        ({"target": "cheap"}, "planner.target: "),
    ],
)
def test_a_wrong_value_at_run_time_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlannerConfigError) as caught:
        with_changes(PlannerSettings(), changes)
    assert reason in str(caught.value)


def test_a_pool_serves_its_model_or_every_model() -> None:
    pools = [Pool("any"), Pool("m", model="m"), Pool("other", model="other")]
    assert [pool.name for pool in pools_of(pools, "m")] == ["any", "m"]
    assert pools_of([pools[2]], "m") == []


def test_a_pool_has_the_step_times_of_its_profile() -> None:
    (pool,) = plan_options(PlannerSettings(pools=["a:profile=h100-llama-3.1-8b"]))[1]
    assert pool.step_profile is not None
    assert pool.step_profile.limits is not None
