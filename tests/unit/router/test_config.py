"""Invalid settings are refused with their key and the reason."""

from typing import Any

import pytest

from kvmesh.router.config import check_settings, cost_model, fair_weights
from kvmesh.router.errors import RouterConfigError
from kvmesh.settings import SettingsError, load
from kvmesh.settings.schema import RouterSettings


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"policy": "fastest"}, "policy"),
        ({"overlap_credits": [1.0, 0.5, -0.1, 0.0]}, "overlap_credits"),
        ({"decode_credits": [float("nan"), 0.0, 0.0, 0.0]}, "decode_credits"),
        ({"prefill_credits": [1.5, 0.0, 0.0, 0.0]}, "prefill_credits"),
        ({"temperature": float("inf")}, "temperature"),
        ({"prefill_weight": float("nan")}, "prefill_weight"),
        ({"predicted_ttl_s": 400.0}, "predicted_ttl_s"),
        ({"rescore_s": 60.0}, "rescore_s"),
        ({"fair_weights": ["gold"]}, "fair_weights"),
        ({"fair_weights": ["gold=0"]}, "fair_weights"),
        ({"fair_weights": ["gold=much"]}, "fair_weights"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_with_their_key(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(RouterConfigError) as caught:
        check_settings(RouterSettings(**settings))
    assert caught.value.key == key
    assert str(caught.value).startswith(f"[router] {key}: ")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PREFILL_WEIGHT", "-1"),
        ("TEMPERATURE", "nan"),
        ("BUSY_BLOCKS_SHARE", "1.5"),
        ("QUEUE_ORDER", "fifo"),
        ("OVERLAP_CREDITS", "1,2"),
        ("SESSION_MODE", "firm"),
    ],
)
def test_the_schema_refuses_what_is_out_of_bounds(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"KVMESH_ROUTER_{variable}"):
        load(None, {f"KVMESH_ROUTER_{variable}": value}, {})


def test_the_defaults_are_those_of_the_documented_cost() -> None:
    check_settings(RouterSettings())
    model = cost_model(RouterSettings())
    assert model.credits == (1.0, 0.75, 0.25, 0.25)
    assert (model.prefill_weight, model.request_weight, model.temperature) == (None, 0.0, 0.0)
    assert cost_model(RouterSettings(), computes=False).prefill_weight == 3.0
    assert cost_model(RouterSettings(prefill_weight=1.0), computes=False).prefill_weight == 1.0


def test_fair_weights_may_hold_equal_signs_in_names() -> None:
    settings = RouterSettings(fair_weights=["team=a=2.5", "free=1"])
    assert fair_weights(settings) == {"team=a": 2.5, "free": 1.0}
