"""Import order of the indexer's modules, and purity of its core."""

from support.layers import imports_of, modules_of, upward_imports

LAYERS = [
    ["service"],
    ["checker", "queries", "snapshots"],
    ["feed"],
    ["rank_state"],
    ["incarnations", "index_check", "shards"],
    ["decoding", "removed_blocks"],
    ["metrics", "readiness", "shortfall"],
]


def test_imports_only_point_downwards() -> None:
    assert upward_imports("indexer", LAYERS) == []
    assert modules_of("indexer") == {name for layer in LAYERS for name in layer}


def test_the_core_has_no_event_loop_and_no_clock() -> None:
    pure = [
        "rank_state",
        "incarnations",
        "shards",
        "decoding",
        "readiness",
        "shortfall",
        "index_check",
        "removed_blocks",
    ]
    assert imports_of("indexer", pure, ["asyncio", "datetime", "threading", "time"]) == []
