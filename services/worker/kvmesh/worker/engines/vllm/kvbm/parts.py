"""The parts of a block of vLLM: one for each group of layers and each rank that has its own.

vLLM allocates blocks per group: layers of one kind of attention share a block table. Under tensor
parallelism, each rank has the KV of its heads; of MLA, several ranks have the same.

Layers of linear attention have a state instead of KV. The block of such a group is the state at its
end, and vLLM keeps few of them. A prompt continues from one state, so these parts have a window of
one block.

Layers of one group may have KV of different sizes (the indexer of sparse attention beside MLA).
vLLM's scheduler knows one layer's kind, and how many bytes each takes: the layout is in bytes.
"""

from math import ceil
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import KvLayout, LayerLayout

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOW = ("SlidingWindowSpec",)
STATE = ("MambaSpec",)


class KvGroup(Struct, frozen=True, kw_only=True):
    """Layers that share a block table: group `index` of vLLM. `layout` is of its first part.

    `has_state`: a block is the state of the layers at its end. `is_speculative`: vLLM has further
    states for tokens that it may discard. `padding`: bytes at most by which blocks are filled up.
    """

    index: int
    layers: list[str]
    layout: KvLayout
    has_state: bool = False
    is_speculative: bool = False
    padding: int = 0


class KvParts(Struct, frozen=True, kw_only=True):
    """The parts of the blocks of an engine, of `block_size` tokens; the lead's group comes first.

    Each group is divided into `shards`, by heads; `replicas` consecutive ranks have the same shard.
    """

    block_size: int
    groups: list[KvGroup]
    shards: int
    replicas: int

    @property
    def layouts(self) -> list[KvLayout]:
        """The layouts of all parts, group by group."""
        return [self.part(g, s) for g in range(len(self.groups)) for s in range(self.shards)]

    def part(self, group: int, shard: int) -> KvLayout:
        """The layout of one shard of `groups[group]`."""
        layout = self.groups[group].layout
        parts = len(self.groups) * self.shards
        return replace(layout, part=group * self.shards + shard, parts=parts)

    def of_rank(self, rank: int) -> list[KvLayout]:
        """The layouts of the parts of a tensor parallel rank, one per group."""
        return [self.part(group, rank // self.replicas) for group in range(len(self.groups))]

    def writes(self, rank: int) -> bool:
        """True for one of the ranks that have the same shard."""
        return rank % self.replicas == 0

    @property
    def states(self) -> list[int]:
        """The numbers of the groups with states."""
        return [number for number, group in enumerate(self.groups) if group.has_state]

    @property
    def is_speculative(self) -> bool:
        """True if some group is."""
        return any(group.is_speculative for group in self.groups)

    def first_needed(self, group: int, end: int) -> int:
        """The first block that a group needs to continue after `end` blocks."""
        window = self.groups[group].layout.window
        return max(0, (end * self.block_size - window + 1) // self.block_size) if window else 0


def kv_parts(config: Any, ranks: int, weights: str, engine: str) -> KvParts:
    """The parts of a model, from vLLM's `KVCacheConfig` and the number of tensor parallel ranks.

    `weights` and `engine` as in `KvLayout`. Raises ValueError for a model with other KV.
    """
    pages = {
        name: min(tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for name in tensor.layers
    }
    groups = [
        _group(index, group, pages, weights, engine)
        for index, group in enumerate(config.kv_cache_groups)
    ]
    if not groups:
        raise ValueError("the block manager needs a model with attention layers")
    sizes = {group.layout.block_size for group in groups}
    if len(sizes) > 1:
        named = ", ".join(map(str, sorted(sizes)))
        raise ValueError(f"the block manager needs blocks of one size, not of {named} tokens")
    groups.sort(key=lambda group: group.layout.window > 0)
    lead, *others = groups
    replicas = config.kv_tp_replicas
    states = [group for group in groups if group.has_state]
    if states and replicas > 1:  # the ranks with the same KV have different states
        raise ValueError(
            f"the block manager cannot store the states of {states[0].layers[0]} "
            f"with more tensor parallel ranks than heads of KV"
        )
    if lead.has_state:
        raise _refusal(lead.layers[0], STATE[0])
    # all blocks of the lead are kept: lookups follow it from the root on
    groups = [replace(lead, layout=replace(lead.layout, window=0)), *others]
    return KvParts(
        block_size=sizes.pop(), groups=groups, shards=ranks // replicas, replicas=replicas
    )


def _group(index: int, group: Any, pages: dict[str, int], weights: str, engine: str) -> KvGroup:
    """`pages`: bytes of each layer in a block, with padding; others use the KV of these."""
    names, spec = [name for name in group.layer_names if name in pages], group.kv_cache_spec
    # in a worker, layers of one kind and different sizes have a spec each
    specs = getattr(spec, "kv_cache_specs", dict.fromkeys(names, spec))
    for name in names:
        kind = type(specs[name]).__name__
        stored = kind in FULL + WINDOW or (
            kind in STATE and specs[name].mamba_cache_mode == "align"
        )
        if not stored or not group.enable_kv_transfer or group.host_resident:
            raise _refusal(name, kind)
    spec, size = specs[names[0]], spec.block_size
    kind = type(spec).__name__
    if kind in STATE:
        return _state_group(index, group, weights, engine)
    sizes = [pages[name] for name in names]
    is_uniform = len(set(sizes)) == 1
    layout = KvLayout(
        weights=weights,
        engine=engine,
        block_size=size,
        window=spec.sliding_window + spec.extra_retained_tokens if kind in WINDOW else 0,
        **(_equal_layers(spec, len(names)) if is_uniform else _unlike_layers(sizes, size)),
    )
    padding = 0 if is_uniform else layout.block_bytes - 1
    return KvGroup(index=index, layers=names, layout=layout, padding=padding)


def _state_group(index: int, group: Any, weights: str, engine: str) -> KvGroup:
    spec, count = group.kv_cache_spec, len(group.layer_names)
    tensors = zip(spec.dtypes, spec.shapes, strict=True)
    kinds = [f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in tensors]
    token_bytes = ceil(count * spec.state_content_size_bytes / spec.block_size)
    layout = KvLayout(
        weights=weights,
        engine=engine,
        block_size=spec.block_size,
        dtype=f"states of {count} layers, each {', '.join(kinds)}",
        item_bytes=1,
        layers=[LayerLayout(1, token_bytes, 0)],
        window=spec.block_size,
    )
    return KvGroup(
        index=index,
        layers=list(group.layer_names),
        layout=layout,
        has_state=True,
        padding=spec.block_size - 1,
        is_speculative=spec.num_speculative_blocks > 0,
    )


def _refusal(layer: str, kind: str) -> ValueError:
    return ValueError(
        f"the block manager cannot store the KV of {layer} ({kind}): "
        "run this model without vllm.kvbm"
    )


def _equal_layers(spec: Any, count: int) -> dict[str, Any]:
    name = str(spec.dtype).removeprefix("torch.")
    # True if the KV of a token is not an array of the type, for example quantized with scales
    if not (spec.state_content_bytes is not None or spec.tokens_per_state != 1):
        layer = LayerLayout(spec.num_heads, spec.head_size, spec.head_size_v)
        return {"dtype": name, "item_bytes": spec.dtype.itemsize, "layers": [layer] * count}
    token_bytes = spec.num_states * spec.state_content_size_bytes / spec.block_size
    layer = LayerLayout(spec.num_heads, ceil(token_bytes), 0)
    kind = f"{spec.kv_quant_mode.name} in {name}"
    return {"dtype": kind, "item_bytes": 1, "layers": [layer] * count}


def _unlike_layers(pages: list[int], block_size: int) -> dict[str, Any]:
    layers = [LayerLayout(1, ceil(page / block_size), 0) for page in pages]
    return {"dtype": "bytes of unlike layers", "item_bytes": 1, "layers": layers}
