"""Causal attention over a paged pool, registered with transformers under `NAME`.

Keys are visited in tiles of a fixed size, each folded into a running softmax (Dao et al.,
FlashAttention, 2022). Every product has the same shape whatever the batch, and a tile in which a
query sees nothing changes none of its bits: a token's result depends on its own prefix only.
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
WHOLE = 512
LOWEST = -1e30


class AttentionOptions(NamedTuple):
    """How a layer attends: scale of the scores, tokens of its window, cap, and sinks per head."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class Attention(Protocol):
    """What the attention layers of one model call."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """From [heads, tokens, size] of the flat batch to [tokens, heads, value size]."""
        ...


def attach(model: nn.Module, attention: Attention) -> None:
    """Make the layers of `model` call `attention`."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            object.__setattr__(module, "kvmesh_attention", attention)


def _interface(
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
    """The call that transformers makes, tensors being [1, heads, tokens, size]."""
    if attention_mask is not None:
        raise ValueError("the model brings an attention mask of its own")
    attention: Attention = module.kvmesh_attention  # type: ignore[assignment]
    options = AttentionOptions(scaling or query.shape[-1] ** -0.5, sliding_window, softcap, s_aux)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return attention.attend(layer, query[0], key[0], value[0], options)[None], None


AttentionInterface.register(NAME, _interface)


class LayoutProbe:
    """Attends to nothing and notes the shapes that it is called with, by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerLayout] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.layers[layer] = LayerLayout(k.shape[0], k.shape[2], v.shape[2])
        return v.repeat_interleave(q.shape[0] // v.shape[0], 0).transpose(0, 1)


class PagedAttention:
    """Writes the keys and values of `batch` to the pool, then lets its queries see their past."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.batch: Batch | None = None
        self._tile_blocks = max(1, KEY_TILE // pool.layout.block_size)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        batch = self.batch
        if batch is None:
            raise RuntimeError("attention outside of a batch")
        self.pool.write(layer, batch.slots, k.transpose(0, 1), v.transpose(0, 1))
        heads, kv_heads = q.shape[0], k.shape[0]
        tiles = q.transpose(0, 1)[batch.queries]
        shape = (*tiles.shape[:2], kv_heads, heads // kv_heads, q.shape[2])
        grouped = tiles.reshape(shape).permute(0, 2, 3, 1, 4)
        state = _Softmax(grouped.float().flatten(2, 3) * options.scaling, v.shape[2])
        self._visit(layer, batch, state, options)
        out = state.result(_per_row(options.sinks, kv_heads, grouped.shape[3]))
        out = out.view(*grouped.shape[:4], v.shape[2]).permute(0, 3, 1, 2, 4)
        flat = out.reshape(-1, heads, v.shape[2])
        return flat[batch.returns].to(v.dtype)

    def _visit(
        self, layer: int, batch: Batch, state: "_Softmax", options: AttentionOptions
    ) -> None:
        step = self._tile_blocks
        size = step * self.pool.layout.block_size
        groups = state.queries.shape[2] // batch.query_positions.shape[1]
        positions = batch.query_positions.repeat(1, groups)[:, None, :, None]
        tables = torch.nn.functional.pad(batch.tables, (0, -batch.tables.shape[1] % step))
        for start in range(0, batch.lasts[0] + 1, size):
            count = sum(last >= start for last in batch.lasts)
            blocks = start // self.pool.layout.block_size
            keys, values = self.pool.read(layer, tables[:count, blocks : blocks + step])
            places = torch.arange(start, start + size, device=keys.device)
            seen = places <= positions[:count]
            if options.window is not None:
                seen &= places > positions[:count] - options.window
            state.add(count, keys.float(), values.float(), seen, options.softcap)


class _Softmax:
    """A softmax-weighted sum over keys that come tile by tile, for the first `count` queries.

    `queries` is [tiles, kv heads, rows, size]; a row is one query of one head.
    """

    def __init__(self, queries: Tensor, value_size: int) -> None:
        shape = queries.shape[:3]
        self.queries = queries.contiguous()
        self._highest = queries.new_full((*shape, 1), LOWEST)
        self._total = queries.new_zeros((*shape, 1))
        self._sum = queries.new_zeros((*shape, value_size))

    def add(
        self, count: int, keys: Tensor, values: Tensor, seen: Tensor, softcap: float | None
    ) -> None:
        """Fold in keys and values [count, kv heads, keys, size]; `seen` tells who sees which."""
        scores = _product(self.queries[:count], keys.transpose(2, 3))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        highest = torch.maximum(self._highest[:count], scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - highest)
        decay = _exp(self._highest[:count] - highest)
        self._total[:count] = self._total[:count] * decay + weights.sum(-1, keepdim=True)
        self._sum[:count] = self._sum[:count] * decay + _product(weights, values)
        self._highest[:count] = highest

    def result(self, sinks: Tensor | None) -> Tensor:
        """The weighted sums; a sink takes its share of the weight and gives nothing."""
        total = self._total
        if sinks is not None:
            total = total + torch.exp(sinks - self._highest)
        return self._sum / total.clamp_min(1e-30)


def _exp(values: Tensor) -> Tensor:
    """Computed in whole vectors: what is left over at the end would be rounded differently."""
    count = values.numel()
    whole = torch.nn.functional.pad(values.flatten(), (0, -count % WHOLE))
    return torch.exp(whole)[:count].view_as(values)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix products over the first two dimensions, one kernel per pair of matrices."""
    flat = torch.bmm(left.flatten(0, 1).contiguous(), right.flatten(0, 1))
    return flat.view(*left.shape[:2], *flat.shape[1:])


def _per_row(sinks: Tensor | None, kv_heads: int, queries: int) -> Tensor | None:
    """Sinks [heads] as [kv heads, rows, 1]."""
    if sinks is None:
        return None
    return sinks.float().view(kv_heads, -1).repeat_interleave(queries, 1)[..., None]
