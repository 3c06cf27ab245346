"""Use frequency of blocks."""

from kvmesh.kvbm.core.blocks.block import DECAY_S, Frequency


def test_frequency_doubles_and_decays() -> None:
    frequency = Frequency(since=10.0)
    frequency.hit(11.0)
    frequency.hit(12.0)
    assert frequency.at(12.0) == 4
    assert frequency.at(12.0 + 2 * DECAY_S) == 2
    assert frequency.at(12.0 + 50 * DECAY_S) == 0
    frequency.hit(12.0 + 50 * DECAY_S)
    assert frequency.at(12.0 + 50 * DECAY_S) == 2
