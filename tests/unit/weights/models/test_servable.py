"""Only folders that some engine can serve may be pushed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.weights import CHUNK, make_weights, write_safetensors

from kvmesh.demo import model_dir
from kvmesh.weights.checkpoint import INDEX
from kvmesh.weights.errors import CheckpointError
from kvmesh.weights.models.folder import folder_content
from kvmesh.weights.models.servable import check_servable

SHARD = "model-00001-of-00002.safetensors"


def checked(folder: Path) -> None:
    check_servable(folder, folder_content(folder, "m", chunk_bytes=CHUNK))


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder without weights."""
    folder = tmp_path / "m"
    folder.mkdir()
    shutil.copyfile(model_dir() / "tokenizer.json", folder / "tokenizer.json")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def whole(bare: Path) -> Path:
    return make_weights(bare)


def test_whole_folders_and_those_without_any_weights_are_servable(whole: Path, bare: Path) -> None:
    checked(whole)
    (whole / "pytorch_model.bin").write_text("x")
    checked(whole)
    for path in (*whole.glob("*.safetensors"), whole / INDEX, whole / "pytorch_model.bin"):
        path.unlink()
    (bare / "training_args.bin").write_text("x")
    checked(bare)


def _without_shards(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def _only(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        _without_shards(folder)
        (folder / INDEX).unlink()
        if name.endswith("safetensors"):
            write_safetensors(folder / name, {"t": 8})
        else:
            (folder / name).write_text("{}")

    return change


def _without_index_and_a_shard(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / SHARD).unlink()


def _index_of_other_tensors(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = SHARD
    (folder / INDEX).write_text(json.dumps(index))


def _truncated(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:-100])


def _pointer(name: str) -> Callable[[Path], None]:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"

    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def _no(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_shards, f"none of the files that {INDEX} names: {SHARD} and 1 more"),
        (_no(SHARD), f"has no {SHARD}, which"),
        (_only("pytorch_model.bin"), r"only as pytorch_model\.bin; the mesh holds safetensors"),
        (_only("a.gguf"), r"only as a\.gguf"),
        (_only("consolidated.safetensors"), r"only as consolidated\.safetensors"),
        (_only("consolidated.00.pth"), r"only as consolidated\.00\.pth"),
        (_only("pytorch_model.bin.index.json"), r"pytorch_model\.bin\.index\.json without"),
        (_without_index_and_a_shard, f"has no {SHARD}, which belongs to model-00002"),
        (_index_of_other_tensors, rf"{SHARD} has no tensor lm_head\.weight"),
        (_truncated, "is not within its file"),
        (_pointer(SHARD), "not a safetensors file"),
        (_pointer("config.json"), r"cannot read .*config\.json"),
        (_pointer("tokenizer.json"), r"tokenizer\.json that is no JSON"),
        (_no("config.json"), r"has no config\.json"),
        (_no("tokenizer.json"), r"no tokenizer\.json"),
    ],
)
def test_a_folder_that_cannot_serve_is_refused(
    whole: Path, change: Callable[[Path], None], reason: str
) -> None:
    change(whole)
    with pytest.raises(CheckpointError, match=reason):
        checked(whole)


def test_a_missing_target_of_a_link_is_no_absence_of_weights(bare: Path) -> None:
    (bare / "model.safetensors").symlink_to("../../blobs/missing")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        checked(bare)


@pytest.mark.parametrize("content", ["", "[]", "{}", "null"])
def test_a_configuration_without_content_is_refused(whole: Path, content: str) -> None:
    (whole / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checked(whole)
