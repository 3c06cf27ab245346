"""Manifests of weights, also malicious ones."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.weights import CHUNK, make_weights

from kvmesh.weights.checkpoint import checkpoint_manifest
from kvmesh.weights.errors import ManifestError
from kvmesh.weights.manifest import (
    DIGEST_BYTES,
    FileEntry,
    Manifest,
    TensorEntry,
    check,
    decoded,
    unpack,
)

KEY = b"k" * 32
GOOD = Manifest(
    model="m",
    chunk_bytes=1 << 10,
    files=[FileEntry("a.safetensors", 2500), FileEntry("b.safetensors", 1024)],
    tensors=[
        TensorEntry("one", "F32", [10, 10], 0, 100, 400),
        TensorEntry("two", "BF16", [1000], 0, 500, 2000),
        TensorEntry("none", "U8", [0], 0, 500, 0),
        TensorEntry("three", "F4", [6], 1, 1021, 3),
    ],
    digests=bytes(4 * DIGEST_BYTES),
)


def test_chunks_never_span_files() -> None:
    assert GOOD.chunks == [(0, 0, 1024), (0, 1024, 1024), (0, 2048, 452), (1, 0, 1024)]
    assert [list(GOOD.chunks_of(t)) for t in GOOD.tensors] == [[0], [0, 1, 2], [], [3]]
    assert list(GOOD.file_chunks(1)) == [3]
    assert GOOD.file_digests(1) == GOOD.chunk_digest(3)


def test_the_digest_names_the_content() -> None:
    assert replace(GOOD, model="other", revision="r").digest == GOOD.digest
    assert replace(GOOD, digests=b"1" * 4 * DIGEST_BYTES).digest != GOOD.digest
    assert replace(GOOD, processed=True).digest != GOOD.digest


def test_a_manifest_travels_under_the_meshs_key(tmp_path: Path) -> None:
    made = checkpoint_manifest(make_weights(tmp_path), model="m", chunk_bytes=CHUNK)
    packed = made.pack(KEY)
    assert unpack(packed, KEY) == made
    assert unpack(packed, KEY).digest == made.digest
    with pytest.raises(ManifestError, match="key"):
        unpack(packed, b"x" * 32)
    with pytest.raises(ManifestError, match="key"):
        unpack(packed[:-1] + b"\0", KEY)
    with pytest.raises(ManifestError, match="key"):
        unpack(b"", KEY)


BAD: list[dict[str, Any]] = [
    {"files": []},
    {"files": [FileEntry("../a", 2500), FileEntry("b", 1024)]},
    {"files": [FileEntry("a/b", 2500), FileEntry("b", 1024)]},
    {"files": [FileEntry("..", 2500), FileEntry("b", 1024)]},
    {"files": [FileEntry("", 2500), FileEntry("b", 1024)]},
    {"files": [FileEntry("a\0", 2500), FileEntry("b", 1024)]},
    {"files": [FileEntry("a\n", 2500), FileEntry("b", 1024)]},
    {"files": [FileEntry("é" * 200, 2500), FileEntry("b", 1024)]},
    {"files": [FileEntry("b", 2500), FileEntry("b", 1024)]},
    {"files": [FileEntry("a", 0), FileEntry("b", 1024)]},
    {"files": [FileEntry("a", -1), FileEntry("b", 1024)]},
    {"files": [FileEntry("a", 1 << 60), FileEntry("b", 1024)]},
    {"chunk_bytes": 0},
    {"chunk_bytes": 1 << 40},
    {"digests": bytes(3 * DIGEST_BYTES)},
    {"rank": 1},
    {"rank": -1},
    {"model": "m" * 2000},
    {"tensors": [TensorEntry("t", "F32", [10], 2, 0, 40)]},
    {"tensors": [TensorEntry("t", "F32", [10], -1, 0, 40)]},
    {"tensors": [TensorEntry("t", "F32", [10], 0, -40, 40)]},
    {"tensors": [TensorEntry("t", "F32", [10], 0, 2480, 40)]},
    {"tensors": [TensorEntry("t", "F32", [10], 0, 0, 44)]},
    {"tensors": [TensorEntry("t", "F32", [-10], 0, 0, -40)]},
    {"tensors": [TensorEntry("t", "F32", [10], 0, 0, 40), TensorEntry("u", "U8", [1], 0, 39, 1)]},
    {"tensors": [TensorEntry("t", "F32", [10], 0, 0, 40), TensorEntry("t", "U8", [1], 0, 40, 1)]},
    {"tensors": [TensorEntry("t", "F32", [1] * 33, 0, 0, 4)]},
    {"tensors": [TensorEntry("t" * 2000, "F32", [1], 0, 0, 4)]},
]


@pytest.mark.parametrize("change", BAD)
def test_a_malicious_manifest_is_refused(change: dict[str, Any]) -> None:
    check(GOOD)
    with pytest.raises(ManifestError):
        decoded(replace(GOOD, **change).encoded())


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ManifestError):
        decoded(noise)


@given(st.dictionaries(st.sampled_from(list(GOOD.__struct_fields__)), st.integers() | st.text()))
def test_fields_of_wrong_types_are_refused(fields: dict[str, Any]) -> None:
    content = msgspec.msgpack.decode(GOOD.encoded()) | fields
    try:
        encoded = msgspec.msgpack.encode(content)
    except (OverflowError, UnicodeEncodeError):
        return
    try:
        check(decoded(encoded))
    except ManifestError:
        return
    assert not {"files", "tensors", "digests"} & set(fields)
