"""Copies between vLLM's KV tensors and the arena, whatever the tensors' strides are."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.bus.messages import KvLayout, LayerLayout
from kvmesh.worker.engines.vllm.kvbm.parts import KvGroup, KvParts

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 4, 16
LAYOUT = KvLayout(
    weights="w",
    dtype="float32",
    item_bytes=4,
    block_size=TOKENS,
    layers=[LayerLayout(HEADS, CONTENT // 2, CONTENT // 2)] * 2,
)
PARTS = KvParts(
    block_size=TOKENS,
    groups=[KvGroup(index=0, layers=["a", "b"], layout=LAYOUT)],
    shards=1,
    replicas=1,
)


def heads_first(values: Any) -> Any:
    return values.contiguous()


def tokens_first(values: Any) -> Any:
    return values.transpose(1, 2).contiguous().transpose(1, 2)


def blocks_second(values: Any) -> Any:
    return values.transpose(0, 1).contiguous().transpose(0, 1)


def padded(values: Any) -> Any:
    wide = values.new_zeros(BLOCKS, HEADS, TOKENS, CONTENT + 5)
    wide[..., :CONTENT] = values
    return wide[..., :CONTENT]


def kernel_blocks(values: Any) -> Any:
    """Each block in two of the kernel's, each with half of the tokens."""
    halves = values.unflatten(2, (2, TOKENS // 2)).transpose(1, 2)
    return halves.reshape(2 * BLOCKS, HEADS, TOKENS // 2, CONTENT)


ARRANGEMENTS = [heads_first, tokens_first, blocks_second, padded, kernel_blocks]


def side(arrange: Any, seed: int) -> Any:
    """A worker side of two layers with random content."""
    import torch

    from kvmesh.worker.engines.vllm.kvbm.worker_side import WorkerSide, grouped_caches

    made = torch.Generator().manual_seed(seed)
    caches = {
        name: arrange(torch.randn(BLOCKS, HEADS, TOKENS, CONTENT, generator=made))
        for name in ("a", "b")
    }
    host = torch.zeros(1 << 16, dtype=torch.uint8)
    bridge: Any = SimpleNamespace(arena=lambda name: host if name == "arena" else None)
    return WorkerSide(bridge, PARTS, 0, grouped_caches(caches, PARTS, BLOCKS)), host


@pytest.mark.parametrize("arrange", ARRANGEMENTS)
def test_a_block_has_the_same_bytes_in_every_arrangement(arrange: Any) -> None:
    reference, _ = side(heads_first, 1)
    other, _ = side(arrange, 1)
    rows = reference._copy_aside([4, 1], reference._caches[0])
    assert rows.shape == (2, LAYOUT.block_bytes)
    assert rows.equal(other._copy_aside([4, 1], other._caches[0]))


@pytest.mark.parametrize("arrange", ARRANGEMENTS)
def test_only_the_blocks_of_a_load_change(arrange: Any) -> None:
    from kvmesh.worker.engines.vllm.kvbm.scheduler_side import BlockLoad, GroupLoad

    source, _ = side(heads_first, 1)
    target, host = side(arrange, 2)
    everything = list(range(BLOCKS))
    before = target._copy_aside(everything, target._caches[0])
    rows = source._copy_aside([4, 1], source._caches[0])
    size = LAYOUT.block_bytes
    host[size : 2 * size], host[4 * size : 5 * size] = rows[0], rows[1]
    offsets = [array("Q", [size, 4 * size])]
    target.load(BlockLoad("r", "arena", [GroupLoad([0, 3], offsets)]))
    after = target._copy_aside(everything, target._caches[0])
    assert after[[0, 3]].equal(rows)
    assert after[[1, 2, 4, 5]].equal(before[[1, 2, 4, 5]])
    assert (target.received, target.failed) == ({"r"}, set())


def test_a_load_from_an_unknown_arena_fails() -> None:
    from kvmesh.worker.engines.vllm.kvbm.scheduler_side import BlockLoad, GroupLoad

    target, _ = side(heads_first, 2)
    target.load(BlockLoad("r", "gone", [GroupLoad([0], [array("Q", [0])])]))
    assert (target.received, target.failed) == ({"r"}, {"r"})


def test_tensors_that_do_not_fit_the_layout_are_refused() -> None:
    import torch

    from kvmesh.worker.engines.vllm.kvbm.worker_side import grouped_caches

    small = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.float16)
    with pytest.raises(ValueError, match="the KV of a: a block has 512 bytes, not 1024"):
        grouped_caches({"a": small, "b": small}, PARTS, BLOCKS)
    odd = torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT)
    with pytest.raises(ValueError, match="the KV of 6 blocks has the shape"):
        grouped_caches({"a": odd, "b": odd}, PARTS, BLOCKS)
