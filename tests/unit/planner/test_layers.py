"""Import order of the planner's modules, and purity of its core."""

from support.layers import imports_of, modules_of, upward_imports

LAYERS = [
    ["service"],
    [
        *("fleet_driver", "homes", "idle_models", "leadership", "models", "oracle_client"),
        *("promotions", "record", "role_driver"),
    ],
    ["metrics", "connectors", "config"],
    ["profiles"],
    ["core"],
    ["capacity"],
    ["prediction"],
    ["errors"],
]


def test_imports_only_point_downwards() -> None:
    assert upward_imports("planner", LAYERS) == []
    assert modules_of("planner") == {name for layer in LAYERS for name in layer}


def test_decisions_have_no_event_loop_and_no_clock() -> None:
    pure = ["core", "capacity", "prediction", "config"]
    assert imports_of("planner", pure, ["asyncio", "datetime", "threading", "time"]) == []
