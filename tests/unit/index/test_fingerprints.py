"""Fingerprints and digests of blocks."""

from array import array

import pytest

from kvmesh.index.fingerprints import HashRun, digest, fingerprints, unpack


def pack(*hashes: int) -> bytes:
    return array("Q", hashes).tobytes()


RUN = HashRun(0, pack(1, 2, 3), pack(11, 12, 13))


def test_order_and_repeats_do_not_matter() -> None:
    parts = [
        HashRun(0, pack(3), pack(13)),
        HashRun(0, pack(1, 2), pack(11, 12)),
        HashRun(0, pack(2), pack(12)),
    ]
    assert list(fingerprints(parts)) == list(fingerprints([RUN]))
    assert digest(fingerprints(parts)) == digest(fingerprints([RUN]))


@pytest.mark.parametrize(
    "other",
    [
        HashRun(1, RUN.engine, RUN.local),
        HashRun(0, pack(1, 2), pack(11, 12)),
        HashRun(0, pack(1, 2, 4), pack(11, 12, 13)),
        HashRun(0, pack(1, 2, 3), pack(11, 13, 12)),  # the same hashes, paired otherwise
    ],
)
def test_every_part_of_a_block_matters(other: HashRun) -> None:
    assert digest(fingerprints([other])) != digest(fingerprints([RUN]))


def test_no_blocks_have_a_digest_of_zero() -> None:
    assert digest(fingerprints([])) == 0
    assert len(unpack(b"")) == 0


def test_fingerprints_survive_the_wire() -> None:
    found = fingerprints([RUN])
    assert list(unpack(found.astype("<u8").tobytes())) == list(found)
    with pytest.raises(ValueError, match="multiple"):
        unpack(b"123")
