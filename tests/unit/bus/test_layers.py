"""Import order of the bus's modules."""

from support.layers import modules_of, upward_imports

LAYERS = [
    ["discovery"],
    ["storage"],
    ["streams"],
    ["client"],
    ["connection"],
    ["permissions"],
    ["subjects"],
    ["messages"],
    [
        "absence",
        "errors",
        "backoff",
        "faults",
        "log_once",
        "metrics",
        "packs",
        "promptness",
        "server_clock",
        "ticks",
    ],
]


def test_imports_only_point_downwards() -> None:
    assert upward_imports("bus", LAYERS) == []
    assert modules_of("bus") == {name for layer in LAYERS for name in layer}
