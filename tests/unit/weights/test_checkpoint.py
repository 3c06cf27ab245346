"""Manifests of model folders."""

import json
import os
from pathlib import Path

import pytest
from blake3 import blake3
from support.weights import CHUNK, make_weights, write_safetensors

from kvmesh.weights.checkpoint import checkpoint_manifest, weight_files
from kvmesh.weights.errors import CheckpointError


def test_every_chunk_and_tensor_is_described(tmp_path: Path) -> None:
    folder = make_weights(tmp_path / "model")
    manifest = checkpoint_manifest(folder, model="m", chunk_bytes=CHUNK)
    assert [f.name for f in manifest.files] == [p.name for p in weight_files(folder)]
    contents = [(folder / file.name).read_bytes() for file in manifest.files]
    for number, (file, offset, size) in enumerate(manifest.chunks):
        expected = blake3(contents[file][offset : offset + size]).digest()
        assert manifest.chunk_digest(number) == expected
    assert len(manifest.tensors) == 8
    ends = {t.file: t.offset + t.size for t in manifest.tensors}
    assert ends == {1: len(contents[1]), 2: len(contents[2])}


def test_the_same_files_elsewhere_have_the_same_digest(tmp_path: Path) -> None:
    one, other = (make_weights(tmp_path / name) for name in ("one", "other"))
    (other / "consolidated.safetensors").write_bytes(b"")
    (other / "config.json").write_text("{}")
    digests = {checkpoint_manifest(f, model=f.name, chunk_bytes=CHUNK).digest for f in (one, other)}
    assert len(digests) == 1
    write_safetensors(other / "model-00002-of-00002.safetensors", {"layer.1.0": 200_000}, seed=9)
    assert checkpoint_manifest(other, chunk_bytes=CHUNK).digest not in digests


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": ["awq"]}}, ""),
        ({"quantization_config": None}, ""),
        ([], ""),
    ],
)
def test_the_quantisation_is_a_label(tmp_path: Path, config: object, method: str) -> None:
    folder = make_weights(tmp_path / "model")
    plain = checkpoint_manifest(folder, chunk_bytes=CHUNK)
    (folder / "config.json").write_text(json.dumps(config))
    manifest = checkpoint_manifest(folder, chunk_bytes=CHUNK)
    assert (plain.quantization, manifest.quantization) == ("", method)
    assert plain.digest == manifest.digest


def test_digests_of_unchanged_files_are_kept(tmp_path: Path) -> None:
    folder, cache = make_weights(tmp_path / "model", files=1), tmp_path / "cache"
    (file,) = weight_files(folder)
    first = checkpoint_manifest(folder, chunk_bytes=CHUNK, cache=cache)
    (kept,) = cache.iterdir()
    damaged = kept.read_bytes()
    kept.write_bytes(bytes(len(damaged)))
    assert checkpoint_manifest(folder, chunk_bytes=CHUNK, cache=cache) == first
    assert kept.read_bytes() == damaged
    found = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert checkpoint_manifest(folder, chunk_bytes=CHUNK, cache=cache) == first
    os.utime(file)
    assert checkpoint_manifest(folder, chunk_bytes=CHUNK, cache=cache) != first


def test_a_folder_without_weights_has_no_files(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == []
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(tmp_path) == []
    with pytest.raises(CheckpointError, match="no safetensors"):
        checkpoint_manifest(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../b.safetensors"}}',
    ],
)
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError):
        weight_files(tmp_path)


def test_a_partial_folder_is_refused(tmp_path: Path) -> None:
    make_weights(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00001"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        (1 << 62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{,",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (9).to_bytes(8, "little") + b'{"a": []}',
    ],
)
def test_a_malformed_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError):
        checkpoint_manifest(tmp_path)


def test_a_tensor_beyond_the_end_of_its_file_is_refused(tmp_path: Path) -> None:
    header = {"a": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"short")
    with pytest.raises(CheckpointError, match="not within its file"):
        checkpoint_manifest(tmp_path)
