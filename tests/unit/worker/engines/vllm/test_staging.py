"""Blocks of vLLM on their way to the arena: their rows are read when filled, and reused then."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import torch
from support.wait import eventually

from kvmesh._native import xxh3
from kvmesh.bus.messages import KvLayout, LayerLayout
from kvmesh.worker.engines.vllm.kvbm.staging import (
    STAGING_BYTES,
    RowStaging,
    StagedRows,
    staging_rows,
)
from kvmesh.worker.engines.vllm.kvbm.writer import PartWriter, StagedBlocks

ROW = 8


class Copying:
    """A copy that ends when the test says so."""

    ended = False
    seconds = 0.0

    def wait(self) -> None:
        raise AssertionError("nobody waits in a thread")


def staged(staging: RowStaging, count: int) -> StagedRows:
    taken = staging.take(count)
    assert taken is not None
    return taken


def part_writer(host: torch.Tensor) -> PartWriter:
    layout = KvLayout(
        weights="w", dtype="float32", item_bytes=4, block_size=1, layers=[LayerLayout(1, 1, 1)]
    )
    client: Any = SimpleNamespace(key=None)
    arenas: Any = SimpleNamespace(of=lambda arena: host)
    return PartWriter(client, layout, arenas, 4)


def test_rows_are_the_first_free_ones() -> None:
    staging = RowStaging(4, ROW, ROW, page_locked=False)
    one, two = staged(staging, 1), staged(staging, 2)
    assert (one.offsets, two.offsets) == ([0], [8, 16])
    assert staging.take(2) is None
    one.release()
    assert staged(staging, 2).offsets == [0, 24]


def test_rows_are_reused_when_their_copy_has_ended() -> None:
    staging, copying = RowStaging(2, ROW, ROW, page_locked=False), Copying()
    rows = staged(staging, 2)
    rows.copied = copying
    rows.release()
    assert staging.take(1) is None
    copying.ended = True
    assert staged(staging, 2).offsets == [0, 8]


def test_the_number_of_rows_is_bounded() -> None:
    assert staging_rows(4096, 10, STAGING_BYTES // 100) == 100
    assert staging_rows(4096, 512, STAGING_BYTES // 100) == 1024
    assert staging_rows(50, 512, 1) == 50
    assert staging_rows(0, 512, 1) == 0


async def test_rows_are_written_when_they_are_filled() -> None:
    staging, host, copying = (
        RowStaging(2, ROW, ROW, False),
        torch.zeros(32, dtype=torch.uint8),
        Copying(),
    )
    rows = staged(staging, 2)
    rows.copied = copying
    staging.memory.fill_(1)
    writer = part_writer(host)
    prompt: Any = None
    item = StagedBlocks("r", prompt)
    item.staged.append(rows)
    item.rows.update({5: (rows, 0), 6: (rows, 1)})
    pending: Any = SimpleNamespace(blocks=[6, 5], offsets=[24, 0], arena=None)
    task = asyncio.create_task(writer.copy(item, pending))
    await asyncio.sleep(0)
    assert not host.any()
    rows.row(0).fill_(7)
    rows.row(1).fill_(9)
    copying.ended = True
    checksums = await asyncio.wait_for(task, 30)
    assert bytes(host.tolist()) == bytes([7] * 8 + [0] * 16 + [9] * 8)
    assert list(checksums) == [xxh3(bytes([9] * 8)), xxh3(bytes([7] * 8))]
    await writer.close()


async def test_rows_that_are_not_queued_are_given_back() -> None:
    staging = RowStaging(2, ROW, ROW, page_locked=False)
    writer = part_writer(torch.zeros(0, dtype=torch.uint8))
    prompt: Any = SimpleNamespace(tokens=[1, 2])
    writer.put("r", prompt, 0, staged(staging, 2))  # no kvbm is attached
    await eventually(lambda: staging.take(2) is not None)
    await writer.close()
