"""Seal: only blocks sealed with the key are accepted from a store that others can write to."""

import os

import pytest

from kvmesh._native import xxh3
from kvmesh.kvbm.tiers.remote.seal import SEAL_BYTES, Seal

KEY, DIGEST, NOTE = bytes(range(32)), b"d" * 16, b"note"
CONTENT = memoryview(bytes(range(256)) * 64)
SEALED = Seal(KEY).seal(DIGEST, NOTE, CONTENT)


def test_a_sealed_note_is_opened() -> None:
    assert Seal(KEY).open(DIGEST, SEALED, CONTENT) == NOTE


@pytest.mark.parametrize("index", [0, SEAL_BYTES, len(SEALED) - 1])
def test_a_changed_note_or_seal_is_rejected(index: int) -> None:
    forged = bytearray(SEALED)
    forged[index] ^= 1
    assert Seal(KEY).open(DIGEST, bytes(forged), CONTENT) is None


def test_other_content_is_rejected_even_with_its_checksum() -> None:
    other = memoryview(bytes(len(CONTENT)))
    note = xxh3(other).to_bytes(8, "little")
    assert Seal(KEY).open(DIGEST, SEALED[:SEAL_BYTES] + note, other) is None
    assert Seal(KEY).open(DIGEST, SEALED, other) is None


def test_another_digest_or_key_is_rejected() -> None:
    assert Seal(KEY).open(b"e" * 16, SEALED, CONTENT) is None
    assert Seal(os.urandom(32)).open(DIGEST, SEALED, CONTENT) is None


def test_a_short_note_is_rejected() -> None:
    assert Seal(KEY).open(DIGEST, b"", CONTENT) is None
    assert Seal(KEY).open(DIGEST, SEALED[:7], CONTENT) is None
