"""Runs a Hugging Face causal LM over a paged KV pool."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kvmesh._native import xxh3
from kvmesh.bus.messages import KvLayout
from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.engines.torch.blocks.kv_pool import KvPool
from kvmesh.worker.engines.torch.model.attention import LayoutProbe, PagedAttention, attach
from kvmesh.worker.engines.torch.model.batch import Batch, BatchRow, split_rows
from kvmesh.worker.engines.torch.model.loading import LoadedModel

FINGERPRINT_VALUES = 256


class PagedModel:
    """A model and, after `allocate`, its KV pool.

    The constructor runs one token through the model, to learn the layout of its KV. Every forward
    pass has exactly `pass_tokens` tokens.
    """

    def __init__(self, loaded: LoadedModel, block_size: int, pass_tokens: int) -> None:
        self.module, self.stop_tokens = loaded
        module = self.module
        self.pass_tokens = pass_tokens
        first = next(module.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.vocabulary = 0
        self.layout = self._probe(block_size)
        self._attention: PagedAttention | None = None

    @property
    def pool(self) -> KvPool:
        """The KV pool; raises RuntimeError before `allocate`."""
        return self._paged.pool

    def allocate(self, blocks: int) -> None:
        """Allocate `blocks` blocks, and a scratch block for the KV of padding tokens."""
        pool = KvPool(self.layout, blocks + 1, self.dtype, self.device)
        self._attention = PagedAttention(pool)
        attach(self.module, self._attention)

    def forward(self, rows: Iterable[BatchRow]) -> Tensor:
        """Compute the KV of the rows; it is complete when this returns.

        Returns float32 logits on the CPU, [rows with `wants_logits`, vocabulary].
        """
        logits = [self._forward_pass(part) for part in split_rows(rows, self.pass_tokens)]
        if self.device.type == "cuda":
            # a pass without logits does not wait; copies of the KV and the step's time need the end
            torch.cuda.current_stream(self.device).synchronize()
        return torch.cat(logits)

    @property
    def _paged(self) -> PagedAttention:
        if self._attention is None:
            raise RuntimeError("the model has no pool")
        return self._attention

    def _forward_pass(self, rows: list[BatchRow]) -> Tensor:
        paged = self._paged
        scratch = paged.pool.blocks - 1
        batch = Batch(rows, self.pass_tokens, self.layout.block_size, scratch, self.device)
        paged.batch = batch
        logits = self._logits(batch.tokens, batch.positions, batch.logit_indices)
        return logits[: batch.logit_count].float().cpu()

    def _logits(self, tokens: Tensor, positions: Tensor, indices: Tensor) -> Tensor:
        with torch.inference_mode():
            out = self.module(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=indices,
            )
        logits: Tensor = out.logits[0]
        return logits

    def _probe(self, block_size: int) -> KvLayout:
        """Run one token through the model to record the shapes of its attention layers."""
        probe = LayoutProbe()
        attach(self.module, probe)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        try:
            logits = self._logits(zero, zero, zero)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise EngineConfigError(f"this model cannot run on a paged cache: {error}") from error
        self.vocabulary = logits.shape[-1]
        if sorted(probe.layers) != list(range(len(probe.layers) or 1)):
            raise EngineConfigError("the attention of some layers of this model cannot be paged")
        return KvLayout(
            weights=_fingerprint(self.module),
            dtype=str(self.dtype).removeprefix("torch."),
            item_bytes=self.dtype.itemsize,
            block_size=block_size,
            layers=[probe.layers[i] for i in range(len(probe.layers))],
        )


def _fingerprint(module: nn.Module) -> str:
    """Hash of the name, the shape and the first FINGERPRINT_VALUES values of each weight."""
    digest = 0
    for name, weight in module.named_parameters():
        values = weight.detach().flatten()[:FINGERPRINT_VALUES].float().cpu().numpy().tobytes()
        digest = xxh3(f"{name}{list(weight.shape)}".encode() + values, digest)
    return f"{digest:016x}"
