"""Folders of links for engines that read a model folder."""

from pathlib import Path

import pytest
from support.stored_weights import StoredWeights
from support.weights import make_weights

from kvmesh.worker.adapters.weights.linked_folder import LinkedArgument


@pytest.fixture
def stored(tmp_path: Path) -> StoredWeights:
    model = make_weights(tmp_path / "model")
    (model / "config.json").write_text("{}")
    return StoredWeights(tmp_path, model)


def resolve(stored: StoredWeights, folder: Path, **arguments: str) -> tuple[LinkedArgument, Path]:
    argument = LinkedArgument(stored.access(), folder, "model")
    given = {"model": str(folder), **arguments}
    argument.resolve(given)
    return argument, Path(given["model"])


def test_a_complete_copy_replaces_the_weights_of_the_folder(
    stored: StoredWeights, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    (bare / "model-00009-of-00009.safetensors").write_text("of another model")
    stored.answer()
    stored.arrive()
    argument, linked = resolve(stored, bare)
    assert linked.name == "bare"
    names = {path.name for path in stored.source.iterdir()}
    assert {path.name for path in linked.iterdir()} == names
    assert all((linked / n).read_bytes() == (stored.source / n).read_bytes() for n in names)
    argument.close()
    assert not linked.exists()


def test_without_a_copy_the_folder_stays(stored: StoredWeights) -> None:
    stored.answer(disk="nobody has it")
    assert resolve(stored, stored.source)[1] == stored.source


def test_a_lost_copy_leaves_the_folder(
    stored: StoredWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.weights.stored_copy.ORPHANED_S", 0.05)
    stored.answer()
    stored.arrive([0, 1])
    stored.abandon()
    assert resolve(stored, stored.source)[1] == stored.source


@pytest.mark.parametrize("load_format", ["dummy", "remote_instance"])
def test_a_load_format_of_the_user_is_respected(stored: StoredWeights, load_format: str) -> None:
    stored.answer()
    stored.arrive()
    assert resolve(stored, stored.source, load_format=load_format)[1] == stored.source
