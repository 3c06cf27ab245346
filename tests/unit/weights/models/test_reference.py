"""References to models of the mesh."""

from pathlib import Path

import pytest

from kvmesh.weights.errors import ModelStoreError
from kvmesh.weights.models.reference import name_of_folder, parse_reference

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "name", "digest"),
    [
        ("m", "m", ""),
        ("org/Model-3.1_x", "org/Model-3.1_x", ""),
        (f"m@{DIGEST}", "m", DIGEST),
        (f"m@{DIGEST[:12]}", "m", DIGEST[:12]),
    ],
)
def test_a_reference_has_a_name_and_perhaps_a_digest(text: str, name: str, digest: str) -> None:
    found = parse_reference(text)
    assert found == (name, digest)
    assert str(found) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "/m", "./m", "../m", "m/", "m//x", "a/../b", ".m", "m m", "m\n", "ä"),
        *("m@", "m@abc", f"m@{DIGEST}0", "m@ABCDEFABCDEF", "m@0123456789ag", "m@@", "x" * 201),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ModelStoreError):
        parse_reference(text)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/models/Qwen3-8B", "Qwen3-8B"),
        ("/hub/models--Qwen--Qwen3-8B/snapshots/0123abcd", "Qwen/Qwen3-8B"),
        ("/hub/models--gpt2/snapshots/0123abcd/", "gpt2"),
        ("/hub/models--Qwen--Qwen3-8B/other/0123abcd", "0123abcd"),
        ("/hub/datasets--a--b/snapshots/0123abcd", "0123abcd"),
    ],
)
def test_a_folder_names_its_model(folder: str, name: str) -> None:
    assert name_of_folder(Path(folder)) == name


def test_a_folder_without_a_name_or_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "mine").symlink_to(snapshot)
    assert name_of_folder(tmp_path / "mine") == "mine"
    monkeypatch.chdir(snapshot)
    assert name_of_folder(Path()) == "a/b"
