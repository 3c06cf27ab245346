"""Copies between vLLM's KV tensors and the arena, whatever the tensors' strides are."""

from array import array
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


def side(arrange: Any, seed: int, copies: Any = None) -> Any:
    """A worker side of two layers with random content, and the arena."""
    import torch

    from kvmesh.worker.adapters.copies.host_copies import HostBlockCopies
    from kvmesh.worker.engines.vllm.kvbm.staging import RowStaging
    from kvmesh.worker.engines.vllm.kvbm.worker_side import WorkerSide, grouped_caches

    made = torch.Generator().manual_seed(seed)
    caches = {
        name: arrange(torch.randn(BLOCKS, HEADS, TOKENS, CONTENT, generator=made))
        for name in ("a", "b")
    }
    host = torch.zeros(1 << 16, dtype=torch.uint8)
    bridge = Bridge(host)
    grouped = grouped_caches(caches, PARTS, BLOCKS)
    copies = copies or HostBlockCopies(torch.device("cpu"))
    staging = [RowStaging(8, LAYOUT.block_bytes, LAYOUT.block_bytes, page_locked=False)]
    return WorkerSide(bridge, PARTS, 0, grouped, copies, staging), host  # type: ignore[arg-type]


class Bridge:
    """Records what is written through, and what is skipped."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self.written: list[tuple[str, int, Any]] = []
        self.counts = (0, 0)
        self.skipped = 0

    def arena(self, name: str) -> Any:
        return self._host if name == "arena" else None

    def has_capacity(self, blocks: int) -> bool:
        return True

    def count_skipped(self, blocks: int) -> None:
        self.skipped += blocks

    def extend_prompt(self, *arguments: Any) -> None:
        pass

    def write_through(self, request: str, groups: list[tuple[int, Any]]) -> None:
        self.written += [(request, first, rows) for first, rows in groups]


class HeldCopies:
    """Copies that begin at once and end when the test says so."""

    def __init__(self) -> None:
        import torch

        from kvmesh.worker.adapters.copies.host_copies import HostBlockCopies

        self._copies = HostBlockCopies(torch.device("cpu"))
        self.spans: list[HeldSpan] = []

    def begin_step(self) -> None:
        self._copies.begin_step()

    def end_step(self) -> Any:
        return self._copies.end_step()

    def fill(self, *arguments: Any) -> Any:
        return self._held(self._copies.fill(*arguments))

    def gather(self, *arguments: Any) -> Any:
        return self._held(self._copies.gather(*arguments))

    def _held(self, _: Any) -> "HeldSpan":
        self.spans.append(HeldSpan())
        return self.spans[-1]


class HeldSpan:
    ended = False
    seconds = 1.0

    def wait(self) -> None:
        raise AssertionError("vLLM's thread waits for a copy")


def content(side: Any, blocks: list[int]) -> Any:
    """The rows of blocks."""
    import torch

    rows = torch.zeros(len(blocks), LAYOUT.block_bytes, dtype=torch.uint8)
    offsets = range(0, rows.numel(), LAYOUT.block_bytes)
    side._copies.gather(side._caches[0], blocks, rows.view(-1), offsets)
    return rows


def load(request: str, arena: str, blocks: list[int], offsets: list[int]) -> Any:
    from kvmesh.worker.engines.vllm.kvbm.scheduler_side import BlockLoad, GroupLoad

    return BlockLoad(request, arena, [GroupLoad(blocks, [array("Q", offsets)])])


def save(request: str, first: int, blocks: list[int]) -> Any:
    from kvmesh.worker.engines.vllm.kvbm.scheduler_side import BlockSave, GroupSave

    origin: Any = None
    return BlockSave(request, origin, array("I"), [GroupSave(first, blocks)])


@pytest.mark.parametrize("arrange", ARRANGEMENTS)
def test_a_block_has_the_same_bytes_in_every_arrangement(arrange: Any) -> None:
    reference, _ = side(heads_first, 1)
    other, _ = side(arrange, 1)
    assert content(reference, [4, 1]).equal(content(other, [4, 1]))


@pytest.mark.parametrize("arrange", ARRANGEMENTS)
def test_only_the_blocks_of_a_load_change(arrange: Any) -> None:
    source, _ = side(heads_first, 1)
    target, host = side(arrange, 2)
    everything = list(range(BLOCKS))
    before, rows = content(target, everything), content(source, [4, 1])
    size = LAYOUT.block_bytes
    host[size : 2 * size], host[4 * size : 5 * size] = rows[0], rows[1]
    target.load(load("r", "arena", [0, 3], [size, 4 * size]))
    after = content(target, everything)
    assert after[[0, 3]].equal(rows)
    assert after[[1, 2, 4, 5]].equal(before[[1, 2, 4, 5]])
    assert target.take_loaded() == ({"r"}, set())
    assert target.take_loaded() == (set(), set())


def test_a_load_from_an_unknown_arena_fails() -> None:
    target, _ = side(heads_first, 2)
    target.load(load("r", "gone", [0], [0]))
    assert target.take_loaded() == ({"r"}, {"r"})


def test_a_load_is_reported_when_its_copy_has_ended() -> None:
    copies = HeldCopies()
    target, _ = side(heads_first, 2, copies)
    target.load(load("slow", "arena", [0], [0]))
    target.load(load("fast", "arena", [1], [0]))
    assert target.take_loaded() == (set(), set())
    copies.spans[1].ended = True
    assert target.take_loaded() == ({"fast"}, set())
    copies.spans[0].ended = True
    assert target.take_loaded() == ({"slow"}, set())
    assert target.take_stats().data["copy_bps"] == LAYOUT.block_bytes


def test_saves_of_a_step_are_rows_of_their_requests() -> None:
    source, _ = side(heads_first, 1)
    source.save([save("one", 3, [4, 1]), save("two", 0, [5])], 0)
    (one, first, rows), (two, start, others) = source.bridge.written
    assert (one, first, two, start) == ("one", 3, "two", 0)
    found = [rows.row(0), rows.row(1), others.row(0)]
    assert all(a.equal(b) for a, b in zip(found, content(source, [4, 1, 5]), strict=True))


def test_rows_are_taken_again_when_released_and_filled() -> None:
    copies = HeldCopies()
    source, _ = side(heads_first, 1, copies)
    source.save([save("one", 0, [0, 1, 2, 3, 4, 5]), save("two", 0, [0, 1, 2])], 0)
    assert [request for request, _, _ in source.bridge.written] == ["one"]
    assert source.bridge.skipped == 3
    rows = source.bridge.written[0][2]
    assert not rows.filled
    rows.release()
    source.save([save("three", 0, [0, 1, 2])], 0)
    assert source.bridge.skipped == 6
    copies.spans[0].ended = True
    source.save([save("four", 0, [0, 1, 2])], 0)
    assert [request for request, _, _ in source.bridge.written] == ["one", "four"]


def test_tensors_that_do_not_fit_the_layout_are_refused() -> None:
    import torch

    from kvmesh.worker.engines.vllm.kvbm.worker_side import grouped_caches

    small = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.float16)
    with pytest.raises(ValueError, match="the KV of a: a block has 512 bytes, not 1024"):
        grouped_caches({"a": small, "b": small}, PARTS, BLOCKS)
    odd = torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT)
    with pytest.raises(ValueError, match="the KV of 6 blocks has the shape"):
        grouped_caches({"a": odd, "b": odd}, PARTS, BLOCKS)


def test_a_state_is_stored_with_zeros_at_its_end() -> None:
    """The rows of states lie apart in vLLM's memory; what lies between them is not stored."""
    import torch

    from kvmesh.worker.adapters.copies.host_copies import HostBlockCopies
    from kvmesh.worker.engines.vllm.kvbm.scheduler_side import (
        BlockLoad,
        BlockSave,
        GroupLoad,
        GroupSave,
    )
    from kvmesh.worker.engines.vllm.kvbm.staging import RowStaging
    from kvmesh.worker.engines.vllm.kvbm.worker_side import WorkerSide, grouped_caches

    layout = KvLayout(
        weights="w",
        dtype="state",
        item_bytes=1,
        block_size=TOKENS,
        layers=[LayerLayout(1, 6, 0)],
        window=TOKENS,
    )
    group = KvGroup(index=0, layers=["a", "b"], layout=layout, has_state=True, padding=3)
    parts = KvParts(block_size=TOKENS, groups=[group], shards=1, replicas=1)
    memory = torch.arange(2 * BLOCKS * 32, dtype=torch.int8).view(2, BLOCKS, 1, 1, 32)
    views = {"a": memory[0, ..., :11], "b": memory[1, ..., :11]}
    host = torch.full((100,), 99, dtype=torch.uint8)
    bridge: Any = Bridge(host)
    caches, copies = grouped_caches(views, parts, BLOCKS), HostBlockCopies(torch.device("cpu"))
    staging = [RowStaging(2, layout.block_bytes, 22, page_locked=False)]
    made = WorkerSide(bridge, parts, 0, caches, copies, staging)
    origin: Any = None
    made.save([BlockSave("r", origin, array("I"), [GroupSave(7, [4])])], 1)
    ((_, first, rows),) = bridge.written
    expected = torch.cat(
        [views["a"][4].flatten(), views["b"][4].flatten(), torch.zeros(2, dtype=torch.int8)]
    )
    assert first == 7
    assert rows.row(0).equal(expected.view(torch.uint8))
    before = memory.clone()
    host[:24] = rows.row(0)
    made.load(BlockLoad("r", "arena", [GroupLoad([2], [array("Q", [0])])]))
    assert memory[:, 2, 0, 0, :11].equal(before[:, 4, 0, 0, :11])
    memory[:, 2, 0, 0, :11] = before[:, 2, 0, 0, :11]
    assert memory.equal(before)
    with pytest.raises(ValueError, match="a block has 10 bytes, not 24"):
        grouped_caches({name: view[..., :5] for name, view in views.items()}, parts, BLOCKS)
