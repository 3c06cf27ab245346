"""Arenas as tensors: one per file, however many clients of a process attach to it."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import torch

from kvmesh.blocks.arena import ArenaView
from kvmesh.worker.adapters.arena_tensors import ArenaTensors

pytestmark = pytest.mark.asyncio


def arena(folder: Path, name: str = "arena-1") -> ArenaView:
    file = folder / name
    if not file.exists():
        file.write_bytes(bytes(4096))
    return ArenaView(file, 4096)


async def test_attachments_share_the_tensor_of_a_file(tmp_path: Path) -> None:
    arenas = ArenaTensors(torch.device("cpu"))
    one, two = arena(tmp_path), arena(tmp_path)
    await arenas.adopt(one)
    await arenas.adopt(two)
    assert arenas.of(one) is arenas.of(two) is arenas.named("arena-1")


async def test_a_tensor_lasts_until_the_last_attachment_is_released(tmp_path: Path) -> None:
    arenas = ArenaTensors(torch.device("cpu"))
    one, two = arena(tmp_path), arena(tmp_path)
    await arenas.adopt(one)
    await arenas.adopt(two)
    await arenas.release(one)
    one.close()
    tensor = arenas.of(two)
    tensor[100] = 7
    assert two.view(100, 1)[0] == 7
    await arenas.release(two)
    assert arenas.named("arena-1") is None


async def test_arenas_of_other_files_are_apart(tmp_path: Path) -> None:
    arenas = ArenaTensors(torch.device("cpu"))
    old, new = arena(tmp_path), arena(tmp_path, "arena-2")
    await arenas.adopt(old)
    await arenas.adopt(new)
    await arenas.release(old)
    assert arenas.named("arena-1") is None
    assert arenas.named("arena-2") is arenas.of(new)
