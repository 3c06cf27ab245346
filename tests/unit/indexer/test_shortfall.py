"""Detection of ranks whose index entries fall short of their worker's reports."""

from typing import Any

from kvmesh.bus.messages import Load
from kvmesh.indexer.shortfall import LOOKS_TO_CLEAR, LOOKS_TO_WARN, Shortfall


def load(instance: str = "w-1", **fields: Any) -> Load:
    zeros = dict.fromkeys(Load.__struct_fields__, 0) | {"step_s": 0.0, "busy_s": 0.0}
    return Load(**{**zeros, "instance": instance, **fields})


def test_a_rank_short_of_half_its_blocks_for_a_while_is_reported() -> None:
    shortfall = Shortfall()
    shortfall.record(load(cached_blocks=1000))
    looks = [shortfall.check({("w-1", 0): 400}) for _ in range(LOOKS_TO_WARN)]
    assert [bool(found) for found in looks] == [False] * (LOOKS_TO_WARN - 1) + [True]
    assert "rank 0 of w-1" in looks[-1]["w-1 0"]
    looks = [shortfall.check({("w-1", 0): 600}) for _ in range(LOOKS_TO_CLEAR)]
    assert [bool(found) for found in looks] == [True] * (LOOKS_TO_CLEAR - 1) + [False]


def test_few_blocks_and_departed_workers_are_not_reported() -> None:
    shortfall = Shortfall()
    shortfall.record(load(cached_blocks=100))
    shortfall.record(load("w-2", cached_blocks=1000))
    shortfall.forget("w-2")
    assert not any(shortfall.check({}) for _ in range(2 * LOOKS_TO_WARN))
