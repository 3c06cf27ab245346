"""Causal attention over a paged pool, registered with transformers under `NAME`.

Keys are read in tiles of a fixed size, each folded into a running softmax (Dao et al.,
FlashAttention, 2022). The shape of every matrix product is independent of the batch, and a fully
masked tile leaves a query's result unchanged bit for bit: a token's result depends on its own
prefix only.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvmesh.bus.messages import LayerLayout
from kvmesh.worker.engines.torch.blocks.kv_pool import KvPool
from kvmesh.worker.engines.torch.model.batch import Batch

NAME = "kvmesh_paged"
KEY_TILE = 128
VECTOR_ELEMENTS = 512
MASKED_SCORE = -1e30


class AttentionOptions(NamedTuple):
    """Options of one layer: score scale, sliding window in tokens, soft cap, sinks per head."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class Attention(Protocol):
    """The attention implementation that all layers of one model call."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend the flat batch: q, k, v [heads, tokens, size] to [tokens, heads, value size]."""
        ...


def attach(model: nn.Module, attention: Attention) -> None:
    """Make the attention layers of `model` call `attention`."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            object.__setattr__(module, "kvmesh_attention", attention)


def _transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers; tensors are [1, heads, tokens, size]."""
    if attention_mask is not None:
        raise ValueError("the model passes its own attention mask")
    attention: Attention = module.kvmesh_attention  # type: ignore[assignment]
    options = AttentionOptions(scaling or query.shape[-1] ** -0.5, sliding_window, softcap, s_aux)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return attention.attend(layer, query[0], key[0], value[0], options)[None], None


AttentionInterface.register(NAME, _transformers_attention)


class LayoutProbe:
    """Records the key and value shapes of each layer; computes no attention."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerLayout] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.layers[layer] = LayerLayout(k.shape[0], k.shape[2], v.shape[2])
        return v.repeat_interleave(q.shape[0] // v.shape[0], 0).transpose(0, 1)


class PagedAttention:
    """Writes the keys and values of `batch` to the pool, then attends over the block tables."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.batch: Batch | None = None
        self._tile_blocks = max(1, KEY_TILE // pool.layout.block_size)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        batch = self.batch
        if batch is None:
            raise RuntimeError("attention called without a batch")
        self.pool.write(layer, batch.slot_mapping, k.transpose(0, 1), v.transpose(0, 1))
        heads, kv_heads = q.shape[0], k.shape[0]
        tiles = q.transpose(0, 1)[batch.queries]
        shape = (*tiles.shape[:2], kv_heads, heads // kv_heads, q.shape[2])
        grouped = tiles.reshape(shape).permute(0, 2, 3, 1, 4)
        state = _Softmax(grouped.float().flatten(2, 3) * options.scaling, v.shape[2])
        self._visit_keys(layer, batch, state, options)
        out = state.result(_per_row(options.sinks, kv_heads, grouped.shape[3]))
        out = out.view(*grouped.shape[:4], v.shape[2]).permute(0, 3, 1, 2, 4)
        flat = out.reshape(-1, heads, v.shape[2])
        return flat[batch.output_order].to(v.dtype)

    def _visit_keys(
        self, layer: int, batch: Batch, state: "_Softmax", options: AttentionOptions
    ) -> None:
        step = self._tile_blocks
        size = step * self.pool.layout.block_size
        groups = state.queries.shape[2] // batch.query_positions.shape[1]
        positions = batch.query_positions.repeat(1, groups)[:, None, :, None]
        block_tables = torch.nn.functional.pad(
            batch.block_tables, (0, -batch.block_tables.shape[1] % step)
        )
        for start in range(0, batch.last_positions[0] + 1, size):
            count = sum(last_position >= start for last_position in batch.last_positions)
            blocks = start // self.pool.layout.block_size
            keys, values = self.pool.read(layer, block_tables[:count, blocks : blocks + step])
            key_positions = torch.arange(start, start + size, device=keys.device)
            visible = key_positions <= positions[:count]
            if options.window is not None:
                visible &= key_positions > positions[:count] - options.window
            state.add(count, keys.float(), values.float(), visible, options.softcap)


class _Softmax:
    """A running softmax-weighted sum over tiles of keys.

    `queries` is [tiles, kv heads, rows, size]; a row is one query of one head.
    """

    def __init__(self, queries: Tensor, value_size: int) -> None:
        shape = queries.shape[:3]
        self.queries = queries.contiguous()
        self._highest = queries.new_full((*shape, 1), MASKED_SCORE)
        self._total = queries.new_zeros((*shape, 1))
        self._sum = queries.new_zeros((*shape, value_size))

    def add(
        self, count: int, keys: Tensor, values: Tensor, visible: Tensor, softcap: float | None
    ) -> None:
        """Fold in a tile of keys and values for the first `count` query tiles.

        Keys and values are [count, kv heads, keys, size]; `visible` is the attention mask.
        """
        scores = _product(self.queries[:count], keys.transpose(2, 3))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible, -torch.inf)
        highest = torch.maximum(self._highest[:count], scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - highest)
        decay = _exp(self._highest[:count] - highest)
        self._total[:count] = self._total[:count] * decay + weights.sum(-1, keepdim=True)
        self._sum[:count] = self._sum[:count] * decay + _product(weights, values)
        self._highest[:count] = highest

    def result(self, sinks: Tensor | None) -> Tensor:
        """The weighted sums; sinks add to the denominator only."""
        total = self._total
        if sinks is not None:
            total = total + torch.exp(sinks - self._highest)
        return self._sum / total.clamp_min(1e-30)


def _exp(values: Tensor) -> Tensor:
    """exp padded to whole vectors: the scalar tail of the kernel rounds differently."""
    count = values.numel()
    whole = torch.nn.functional.pad(values.flatten(), (0, -count % VECTOR_ELEMENTS))
    return torch.exp(whole)[:count].view_as(values)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix products over the first two dimensions, one kernel per pair of matrices."""
    flat = torch.bmm(left.flatten(0, 1).contiguous(), right.flatten(0, 1))
    return flat.view(*left.shape[:2], *flat.shape[1:])


def _per_row(sinks: Tensor | None, kv_heads: int, queries: int) -> Tensor | None:
    """Expand sinks from [heads] to [kv heads, rows, 1]."""
    if sinks is None:
        return None
    return sinks.float().view(kv_heads, -1).repeat_interleave(queries, 1)[..., None]
