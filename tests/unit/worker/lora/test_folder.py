"""Checks and digests of LoRA adapters' folders."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.adapter_folder import write_adapter

from kvmesh.worker.lora.folder import AdapterError, configured_adapters, read_adapter


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    first = read_adapter(write_adapter(tmp_path / "a", 1))
    same = read_adapter(write_adapter(tmp_path / "b", 1, base_model_name_or_path="/elsewhere"))
    assert first.digest == same.digest
    assert len(first.digest) == 16
    others = [
        read_adapter(write_adapter(tmp_path / "c", 2)),
        read_adapter(write_adapter(tmp_path / "d", 1, lora_alpha=32)),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 3


def test_a_file_written_again_is_noticed(tmp_path: Path) -> None:
    found = read_adapter(write_adapter(tmp_path / "a", 1))
    assert found.is_unchanged()
    write_adapter(tmp_path / "a", 2)
    assert not found.is_unchanged()
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    assert not found.is_unchanged()


def weights(folder: Path) -> Path:
    return folder / "adapter_model.safetensors"


def rewrite(folder: Path, content: bytes) -> None:
    weights(folder).write_bytes(content)


def header(**tensors: object) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config"),
    "no weights": (lambda f: weights(f).unlink(), "has no adapter_model.safetensors"),
    "a configuration of something else": (
        lambda f: (f / "adapter_config.json").write_text("[1]"),
        "Expected `object`",
    ),
    "bytes for text": (lambda f: (f / "adapter_config.json").write_bytes(b"\xff{"), "adapter_conf"),
    "another method": (lambda f: write_adapter(f, peft_type="IA3"), "peft_type is IA3"),
    "no rank": (lambda f: write_adapter(f, r=0), "rank 0 is less than 1"),
    "a large rank": (lambda f: write_adapter(f, r=64), "rank 64; the engine accepts at most 16"),
    "a large rank of one module": (
        lambda f: write_adapter(f, rank_pattern={"q_proj": 32}),
        "rank 32; the engine accepts at most 16",
    ),
    "an empty file": (lambda f: rewrite(f, b""), "is not a safetensors file"),
    "a huge header": (lambda f: rewrite(f, b"\xff" * 64), "is not a safetensors file"),
    "a torn file": (lambda f: rewrite(f, weights(f).read_bytes()[:-4]), "its header states"),
    "no tensors": (lambda f: rewrite(f, header()), "has no tensors"),
    "no offsets": (lambda f: rewrite(f, header(a={})), "malformed header"),
    "text for a header": (lambda f: rewrite(f, (4).to_bytes(8, "little") + b"abcd"), "malformed"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_folder_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    spoil, reason = BAD[kind]
    spoil(write_adapter(tmp_path / "a"))
    with pytest.raises(AdapterError, match=reason):
        read_adapter(tmp_path / "a", 16)


def test_configured_adapters_have_names_and_folders(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (identity,) = configured_adapters([f"poet={folder}"])
    assert identity == f"poet@{read_adapter(folder).digest}"
    for pairs in (["poet"], [f"po et={folder}"], [f"a@b={folder}"], [f"a={folder}"] * 2):
        with pytest.raises(AdapterError, match="is not NAME=FOLDER"):
            configured_adapters(pairs)
