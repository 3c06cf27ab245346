"""Use frequency of blocks."""

from kvmesh.kvbm.core.blocks.block import Frequency


def test_frequency_doubles_and_decays() -> None:
    frequency = Frequency(since=10.0)
    frequency.hit(11.0, 100.0)
    frequency.hit(12.0, 100.0)
    assert frequency.at(12.0, 100.0) == 4
    assert frequency.at(215.0, 100.0) == 2
    assert frequency.at(5000.0, 100.0) == 0
    frequency.hit(5000.0, 100.0)
    assert frequency.at(5000.0, 100.0) == 2
