"""Manifests of whole model folders."""

from pathlib import Path

import pytest
from support.weights import CHUNK, make_weights, write_safetensors

from kvmesh.weights.checkpoint import INDEX, checkpoint_manifest
from kvmesh.weights.errors import CheckpointError
from kvmesh.weights.models.folder import folder_content, weights_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_weights(tmp_path / "m")
    (folder / "config.json").write_text("{}")
    (folder / "kvmesh.json").write_text("{}")
    return folder


def test_all_files_are_listed_and_the_others_have_a_reason(folder: Path) -> None:
    for name in (".git", "pytorch_model.bin", "a.gguf", "modeling.py", "bad\nname"):
        (folder / name).write_text("x")
    write_safetensors(folder / "consolidated.safetensors", {"t": 8})
    (folder / "onnx").mkdir()
    (folder / "empty.txt").touch()
    content = folder_content(folder, "m", chunk_bytes=CHUNK)
    names = {file.name for file in content.folder.files}
    assert names == {
        *("config.json", "kvmesh.json", INDEX),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    }
    assert content.skipped == {
        ".git": "hidden",
        "pytorch_model.bin": "weights that are not safetensors",
        "a.gguf": "weights that are not safetensors",
        "modeling.py": "code",
        "bad\nname": "its name",
        "consolidated.safetensors": "not among the weights of the folder",
        "onnx": "not a file",
        "empty.txt": "empty",
    }
    with_code = folder_content(folder, "m", chunk_bytes=CHUNK, with_code=True)
    assert {f.name for f in with_code.folder.files} == {*names, "modeling.py"}


def test_named_templates_are_files_of_the_folder(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "notes.txt"):
        (folder / "additional_chat_templates" / name).write_text("t")
    content = folder_content(folder, "m", chunk_bytes=CHUNK)
    names = {file.name for file in content.folder.files}
    assert {name for name in names if "/" in name} == {"additional_chat_templates/tool_use.jinja"}
    assert content.skipped == {}


def test_the_digest_follows_from_the_files_and_not_from_the_name(folder: Path) -> None:
    one = folder_content(folder, "a", chunk_bytes=CHUNK)
    assert folder_content(folder, "b", chunk_bytes=CHUNK).folder.digest == one.folder.digest
    (folder / "config.json").write_text("{ }")
    other = folder_content(folder, "a", chunk_bytes=CHUNK)
    assert other.folder.digest != one.folder.digest
    assert other.weights is not None
    assert one.weights is not None
    assert other.weights.digest == one.weights.digest
    assert one.weights.digest == checkpoint_manifest(folder, chunk_bytes=CHUNK).digest


def test_weights_that_are_not_those_of_the_folder_are_found(folder: Path, tmp_path: Path) -> None:
    content = folder_content(folder, "m", chunk_bytes=CHUNK)
    assert content.weights is not None
    indices = weights_of(content.folder, content.weights)
    assert indices is not None
    assert [content.folder.files[n] for n in indices] == content.weights.files
    other = make_weights(tmp_path / "other")
    path = other / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    changed = checkpoint_manifest(other, chunk_bytes=CHUNK)
    assert weights_of(content.folder, changed) is None
    assert weights_of(content.folder, checkpoint_manifest(folder, chunk_bytes=2 * CHUNK)) is None


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        folder_content(tmp_path, "m")
    with pytest.raises(CheckpointError):
        folder_content(tmp_path / "missing", "m")
