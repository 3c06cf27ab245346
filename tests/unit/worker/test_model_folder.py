"""Folders without weights are refused before an engine starts."""

from pathlib import Path

import pytest

from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.model_folder import check_weights


@pytest.mark.parametrize("name", ["model-1-of-2.safetensors", "pytorch_model.bin", "model.pt"])
def test_files_of_weights_pass(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    check_weights(str(tmp_path), "auto")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.model"])
def test_a_folder_without_weights_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(EngineConfigError, match=f"{tmp_path} has no weights"):
        check_weights(str(tmp_path), "auto")


def test_other_formats_and_names_of_models_are_left_to_the_engine(tmp_path: Path) -> None:
    check_weights(str(tmp_path), "dummy")
    check_weights("Qwen/Qwen3-8B", "auto")
