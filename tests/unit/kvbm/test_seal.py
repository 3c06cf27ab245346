"""Blocks in a store that others can write to: only what was put there with the key is taken."""

import os

import pytest

from kvmesh._native import xxh3
from kvmesh.kvbm.tiers.remote.seal import SEAL_BYTES, Seal

KEY, DIGEST, NOTE = bytes(range(32)), b"d" * 16, b"note"
CONTENT = memoryview(bytes(range(256)) * 64)
SEALED = Seal(KEY).put(DIGEST, NOTE, CONTENT)


def test_what_was_put_is_taken() -> None:
    assert Seal(KEY).take(DIGEST, SEALED, CONTENT) == NOTE


@pytest.mark.parametrize("place", [0, SEAL_BYTES, len(SEALED) - 1])
def test_a_changed_note_or_seal_is_not(place: int) -> None:
    forged = bytearray(SEALED)
    forged[place] ^= 1
    assert Seal(KEY).take(DIGEST, bytes(forged), CONTENT) is None


def test_other_content_is_not_even_with_its_own_checksum() -> None:
    other = memoryview(bytes(len(CONTENT)))
    note = xxh3(other).to_bytes(8, "little")
    assert Seal(KEY).take(DIGEST, SEALED[:SEAL_BYTES] + note, other) is None
    assert Seal(KEY).take(DIGEST, SEALED, other) is None


def test_the_block_of_another_digest_or_key_is_not() -> None:
    assert Seal(KEY).take(b"e" * 16, SEALED, CONTENT) is None
    assert Seal(os.urandom(32)).take(DIGEST, SEALED, CONTENT) is None


def test_what_is_too_short_is_not() -> None:
    assert Seal(KEY).take(DIGEST, b"", CONTENT) is None
    assert Seal(KEY).take(DIGEST, SEALED[:7], CONTENT) is None
