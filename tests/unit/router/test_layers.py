"""Import order of the router's modules, and purity of its core."""

from support.layers import imports_of, modules_of, upward_imports

LAYERS = [
    ["kv_router"],
    ["service"],
    ["model_router"],
    ["adapter_orders"],
    [
        "index_client",
        "metrics",
        "worker_client",
        "placement_trace",
        "returns_report",
        "sequence_feed",
    ],
    ["waiting"],
    ["placement"],
    ["config"],
    ["policies"],
    ["scoring"],
    ["state"],
    ["errors"],
]


def test_imports_only_point_downwards() -> None:
    assert upward_imports("router", LAYERS) == []
    assert modules_of("router") == {name for layer in LAYERS for name in layer}


def test_the_core_has_no_event_loop_and_no_clock() -> None:
    pure = ["waiting", "placement", "policies", "scoring", "state"]
    assert imports_of("router", pure, ["asyncio", "datetime", "threading", "time"]) == []
