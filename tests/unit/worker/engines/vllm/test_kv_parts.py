"""The parts of a block, from descriptions of the KV as vLLM gives them."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvmesh.bus.messages import LayerLayout

torch = pytest.importorskip("torch", reason="needs torch")
kv_parts = pytest.importorskip("kvmesh.worker.engines.vllm.kvbm.parts").kv_parts


@dataclass
class FullAttentionSpec:
    """The fields of vLLM's class of this name that are read."""

    block_size: int = 16
    num_heads: int = 2
    head_size: int = 32
    head_size_v: int = 32
    dtype: Any = field(default_factory=lambda: torch.bfloat16)
    state_content_bytes: int | None = None
    state_content_size_bytes: int = 128
    tokens_per_state: int = 1
    num_states: int = 16
    kv_quant_mode: Any = None


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 64
    extra_retained_tokens: int = 0


@dataclass
class MambaSpec:
    block_size: int = 16
    shapes: Any = ((3, 10), (5,))
    dtypes: Any = field(default_factory=lambda: (torch.bfloat16, torch.float32))
    state_content_size_bytes: int = 80
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0


@dataclass
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, Any]


@dataclass
class Group:
    kv_cache_spec: Any
    layer_names: list[str]
    enable_kv_transfer: bool = True
    host_resident: bool = False


@dataclass
class Tensor:
    layers: list[str]
    layer_stride: int
    block_stride: int


@dataclass
class Config:
    kv_cache_groups: list[Group]
    kv_tp_replicas: int = 1
    pages: dict[str, int] = field(default_factory=dict)

    @property
    def kv_cache_tensors(self) -> list[Tensor]:
        names = [name for group in self.kv_cache_groups for name in group.layer_names]
        pages = {name: self.pages.get(name, 4096) for name in names}
        return [Tensor([name], 10 * page, page) for name, page in pages.items()]


def parts(*specs: Any, ranks: int = 1, replicas: int = 1) -> Any:
    groups = [Group(spec, [f"layer {n}"]) for n, spec in enumerate(specs)]
    return kv_parts(Config(groups, replicas), ranks, "w", "vLLM on cpu")


def test_full_attention_leads() -> None:
    made = parts(SlidingWindowSpec(), FullAttentionSpec())
    assert [group.index for group in made.groups] == [1, 0]
    assert [layout.window for layout in made.layouts] == [0, 64]
    assert [(layout.part, layout.parts) for layout in made.layouts] == [(0, 2), (1, 2)]


def test_windows_alone_are_stored_from_the_root_on_by_the_lead() -> None:
    made = parts(SlidingWindowSpec(), SlidingWindowSpec(sliding_window=128))
    assert [layout.window for layout in made.layouts] == [0, 128]


def test_ranks_have_parts_and_replicas_share_them() -> None:
    made = parts(FullAttentionSpec(), SlidingWindowSpec(), ranks=4, replicas=2)
    assert [layout.part for layout in made.layouts] == [0, 1, 2, 3]
    assert [[layout.part for layout in made.of_rank(rank)] for rank in range(4)] == [
        [0, 2],
        [0, 2],
        [1, 3],
        [1, 3],
    ]
    assert [made.writes(rank) for rank in range(4)] == [True, False, True, False]


@pytest.mark.parametrize(("end", "first"), [(1, 0), (4, 0), (5, 1), (10, 6)])
def test_a_window_needs_its_last_blocks(end: int, first: int) -> None:
    made = parts(FullAttentionSpec(), SlidingWindowSpec(sliding_window=64))
    assert (made.first_needed(0, end), made.first_needed(1, end)) == (0, first)


def test_a_layout_names_type_engine_and_sizes() -> None:
    (layout,) = parts(FullAttentionSpec(head_size=576, head_size_v=0, num_heads=1)).layouts
    assert (layout.dtype, layout.item_bytes) == ("bfloat16", 2)
    assert layout.layers == [LayerLayout(1, 576, 0)]
    assert layout.block_bytes == 16 * 576 * 2
    assert "vLLM on cpu" in layout.summary


def test_layers_of_one_group_have_sizes_of_their_own() -> None:
    """A worker has a spec for each; the scheduler has the first one's, and their strides."""
    specs = {"attention": FullAttentionSpec(num_heads=1, head_size=576, head_size_v=0)}
    specs["indexer"] = FullAttentionSpec(num_heads=1, head_size=132, dtype=torch.uint8)
    pages = {"attention": 16 * 576 * 2, "indexer": 16 * 132}
    of_worker = UniformTypeKVCacheSpecs(16, specs)
    layouts = [
        kv_parts(Config([Group(spec, list(specs))], pages=pages), 1, "w", "vLLM on cpu").layouts
        for spec in (of_worker, specs["attention"])
    ]
    assert layouts[0] == layouts[1]
    (layout,) = layouts[0]
    assert layout.layers == [LayerLayout(1, 2 * 576, 0), LayerLayout(1, 132, 0)]
    assert layout.block_bytes == sum(pages.values())


def test_a_group_is_refused_with_the_layer_that_cannot_be_stored() -> None:
    class CrossAttentionSpec(FullAttentionSpec):
        """Another kind."""

    specs = {"a": FullAttentionSpec(), "b": CrossAttentionSpec()}
    group = Group(UniformTypeKVCacheSpecs(16, specs), ["a", "b"])
    with pytest.raises(ValueError, match=r"cannot store the KV of b \(CrossAttentionSpec\)"):
        kv_parts(Config([group]), 1, "w", "vLLM on cpu")


def test_a_state_is_a_block_of_which_the_last_is_needed() -> None:
    made = parts(MambaSpec(), FullAttentionSpec(), MambaSpec(num_speculative_blocks=2))
    assert [group.index for group in made.groups] == [1, 0, 2]
    assert made.states == [1, 2]
    assert [group.is_speculative for group in made.groups] == [False, False, True]
    assert [made.first_needed(1, end) for end in (1, 2, 10)] == [0, 1, 9]


@pytest.mark.parametrize(("size", "stored"), [(80, 80), (81, 96)])
def test_a_state_is_filled_up_to_a_multiple_of_the_tokens(size: int, stored: int) -> None:
    made = parts(FullAttentionSpec(), MambaSpec(state_content_size_bytes=size))
    assert made.layouts[1].block_bytes == stored
    assert "bfloat16 [3, 10], float32 [5]" in made.layouts[1].summary


def test_ranks_with_the_same_kv_have_different_states() -> None:
    with pytest.raises(ValueError, match="the states of layer 1 with more tensor parallel ranks"):
        parts(FullAttentionSpec(), MambaSpec(), ranks=4, replicas=2)


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([], "needs a model with attention layers"),
        ([MambaSpec()], "cannot store the KV of layer 0 .MambaSpec."),
        (
            [FullAttentionSpec(), MambaSpec(mamba_cache_mode="none")],
            "cannot store the KV of layer 1 .MambaSpec.",
        ),
        ([FullAttentionSpec(), SlidingWindowSpec(block_size=32)], "not of 16, 32 tokens"),
    ],
)
def test_other_models_are_refused(specs: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parts(*specs)
