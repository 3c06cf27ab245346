"""Copies of blocks between tensors and rows: one suite for engines on the CPU and on a GPU."""

from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import torch

from kvmesh.worker.adapters.copies.block_copies import BlockCopies, chunks, row_bytes
from kvmesh.worker.adapters.copies.cuda_copies import CudaBlockCopies
from kvmesh.worker.adapters.copies.host_copies import HostBlockCopies

BLOCKS = 12
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> Any:
    return torch.device(request.param)


@pytest.fixture
def tensors(device: Any) -> list[Any]:
    """Tensors of several types and strides with random content; rows have an odd length."""
    made = torch.Generator().manual_seed(1)
    wide = torch.randn(BLOCKS, 2, 4, 5, generator=made)[..., :3]
    transposed = torch.randn(2, BLOCKS, 8, generator=made).bfloat16().transpose(0, 1)
    octets = torch.randint(0, 255, (BLOCKS, 3), generator=made, dtype=torch.uint8)
    return [tensor.to(device) for tensor in (wide, octets, transposed)]


@pytest.fixture
def copies(device: Any, tensors: list[Any]) -> BlockCopies:
    if device.type == "cpu":
        return HostBlockCopies(device)
    return CudaBlockCopies(device, 2 * row_bytes(tensors))  # so that lanes take turns


def memory(size: int) -> Any:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def places(count: int, size: int) -> list[int]:
    """Offsets of rows: two together, one alone, the others in reverse."""
    slots = [4, 5, 0, *range(count + 6, 9, -1)]
    return [slot * size for slot in slots[:count]]


def expected_rows(tensors: list[Any], blocks: list[int]) -> list[bytes]:
    return [
        b"".join(
            t[block].cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for t in tensors
        )
        for block in blocks
    ]


def test_blocks_are_gathered_to_rows(copies: BlockCopies, tensors: list[Any]) -> None:
    size, blocks = row_bytes(tensors), [7, 0, 3, 11, 2]
    host, offsets = memory(30 * size), places(5, size)
    copies.gather(tensors, blocks, host, offsets).wait()
    found = [host[offset : offset + size].numpy().tobytes() for offset in offsets]
    assert found == expected_rows(tensors, blocks)
    assert sum(map(bool, host)) <= 5 * size


def test_only_the_filled_blocks_change(copies: BlockCopies, tensors: list[Any]) -> None:
    size, everything = row_bytes(tensors), list(range(BLOCKS))
    host, offsets = memory(30 * size), places(5, size)
    host.random_(0, 64)  # as floats, none of them is NaN
    before = expected_rows(tensors, everything)
    copies.begin_step()
    copy = copies.fill(tensors, [7, 0, 3, 11, 2], host, offsets)
    copy.wait()
    assert copy.ended
    assert copy.seconds > 0
    after = expected_rows(tensors, everything)
    for block, offset in zip([7, 0, 3, 11, 2], offsets, strict=True):
        assert after[block] == host[offset : offset + size].numpy().tobytes()
    untouched = set(everything) - {7, 0, 3, 11, 2}
    assert all(after[block] == before[block] for block in untouched)


def test_gathered_rows_hold_what_blocks_had(copies: BlockCopies, tensors: list[Any]) -> None:
    size, blocks = row_bytes(tensors), list(range(BLOCKS))
    host, offsets = memory(30 * size), [block * size for block in blocks]
    before = expected_rows(tensors, blocks)
    copy = copies.gather(tensors, blocks, host, offsets)
    for tensor in tensors:
        tensor.zero_()  # the next step of the engine
    copy.wait()
    assert [host[o : o + size].numpy().tobytes() for o in offsets] == before


def test_a_fill_follows_what_was_computed_before_its_step(
    copies: BlockCopies, tensors: list[Any]
) -> None:
    size = row_bytes(tensors)
    host = memory(size)
    host.fill_(1)
    for _ in range(50):
        tensors[0].mul_(2)
    tensors[0].zero_()
    copies.begin_step()
    copies.fill(tensors, [3], host, [0]).wait()
    assert expected_rows(tensors, [3]) == [bytes([1]) * size]


def test_nothing_is_copied_at_once(copies: BlockCopies, tensors: list[Any]) -> None:
    assert copies.fill(tensors, [], memory(0), []).ended
    assert copies.gather(tensors, [], memory(0), []).ended


def test_a_step_takes_time(copies: BlockCopies, tensors: list[Any]) -> None:
    copies.begin_step()
    tensors[0].mul_(2)
    step = copies.end_step()
    step.wait()
    assert step.ended
    assert step.seconds >= 0


def test_blocks_without_rows_are_refused(copies: BlockCopies, tensors: list[Any]) -> None:
    with pytest.raises(ValueError, match="2 blocks have 1 rows"):
        copies.fill(tensors, [1, 2], memory(100), [0])


def test_contiguous_rows_are_one_run() -> None:
    made = list(chunks([5, 6, 7, 8, 9], [0, 10, 30, 40, 50], 10, 4))
    assert [chunk.blocks for chunk in made] == [[5, 6, 7, 8], [9]]
    assert [list(map(tuple, chunk.runs)) for chunk in made] == [
        [(0, 2, 0), (2, 4, 30)],
        [(0, 1, 50)],
    ]


def test_chunks_cover_all_blocks_once() -> None:
    offsets = [8 * slot for slot in (3, 4, 9, 1, 2, 3, 7, 8, 9, 10)]
    for most in range(1, 12):
        made = list(chunks(range(10), offsets, 8, most))
        assert [block for chunk in made for block in chunk.blocks] == list(range(10))
        for chunk in made:
            assert len(chunk.blocks) <= most
            assert chunk.runs[0].first == 0
            assert chunk.runs[-1].end == len(chunk.blocks)
            assert all(a.end == b.first for a, b in pairwise(chunk.runs))
