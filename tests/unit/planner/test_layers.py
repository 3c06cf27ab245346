"""Import order of the planner's modules, and purity of its core."""

from support.layers import imports_of, modules_of, upward_imports

LAYERS = [
    ["service"],
    ["fleet_driver", "fleet_planner", "idle_models", "leadership"],
    ["models", "record", "worker_commands"],
    ["actions"],
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
    pure = ["core", "capacity", "prediction", "config", "fleet_planner", "models", "actions"]
    pure += ["record"]
    assert imports_of("planner", pure, ["asyncio", "datetime", "threading", "time"]) == []
