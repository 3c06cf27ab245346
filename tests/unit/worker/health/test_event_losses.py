"""Warnings about KV events that do not reach the index."""

from dataclasses import replace

from kvmesh.worker.enginecore.counters import LedgerCounts
from kvmesh.worker.health.event_losses import QUIET_S, EventLosses


def counts(malformed: int = 0, odd_size: int = 0, **dropped: int) -> LedgerCounts:
    return LedgerCounts(
        rank=1,
        block_size=16,
        kept=[5, 0, 0, 0],
        dropped={reason: [blocks, 0, 0, 0] for reason, blocks in dropped.items()},
        malformed=malformed,
        last_error="malformed KV event: TypeError('x')",
        odd_size=odd_size,
    )


def test_each_loss_is_named_with_what_explains_it() -> None:
    losses = EventLosses("w")
    assert losses.check([counts()], 0.0) == {}
    found = losses.check([counts(3, odd_size=528, block_size=1, unknown_position=40)], 1.0)
    assert found.keys() == {"1 block_size", "1 unknown_position", "1 malformed"}
    assert "blocks of 528 tokens, the model's are of 16" in found["1 block_size"]
    assert "TypeError('x')" in found["1 malformed"]
    assert all(text.startswith("w rank 1: ") for text in found.values())


def test_blocks_of_lower_tiers_that_the_index_gives_up_are_named() -> None:
    found = EventLosses("w").check([counts(reset=3, never_removed=5)], 1.0)
    assert "cleared its cache" in found["1 reset"]
    assert "none removed" in found["1 never_removed"]


def test_many_blocks_that_wait_are_named() -> None:
    losses = EventLosses("w")
    assert losses.check([replace(counts(), unplaced=255)], 0.0) == {}
    [text] = losses.check([replace(counts(), unplaced=256)], 1.0).values()
    assert "many blocks wait for a KV event" in text


def test_messages_that_never_arrived_are_named() -> None:
    [text] = EventLosses("w").check([replace(counts(), lost=7)], 1.0).values()
    assert "7 messages of the engine's KV events never arrived" in text


def test_a_few_blocks_without_position_are_no_loss() -> None:
    assert EventLosses("w").check([counts(unknown_position=3)], 0.0) == {}


def test_parts_of_blocks_are_no_loss() -> None:
    assert EventLosses("w").check([counts(part_of_block=300)], 0.0) == {}


def test_a_loss_that_has_stopped_is_no_warning() -> None:
    losses = EventLosses("w")
    assert losses.check([counts(1)], 0.0)
    assert losses.check([counts(1)], QUIET_S - 1)
    assert not losses.check([counts(1)], QUIET_S + 1)
    assert losses.check([counts(2)], QUIET_S + 2)
