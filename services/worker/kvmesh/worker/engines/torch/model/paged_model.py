"""Loads a Hugging Face causal LM from a folder and runs it over a paged KV pool."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from kvmesh._native import xxh3
from kvmesh.bus.messages import KvLayout
from kvmesh.worker.engine import EngineConfigError, EngineError
from kvmesh.worker.engines.torch.blocks.kv_pool import KvPool
from kvmesh.worker.engines.torch.model.attention import NAME, LayoutProbe, PagedAttention, attach
from kvmesh.worker.engines.torch.model.batch import Batch, BatchRow, split_rows

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FINGERPRINT_VALUES = 256
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
_VARYING_ROPE = {"dynamic", "longrope"}


class PagedModel:
    """A model and, after `allocate`, its KV pool.

    `stop_tokens` end an output; every forward pass has exactly `pass_tokens` tokens.
    """

    def __init__(
        self, module: nn.Module, stop_tokens: frozenset[int], block_size: int, pass_tokens: int
    ) -> None:
        self.module = module
        self.stop_tokens = stop_tokens
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


def load_model(
    folder: Path, dtype: str, device: str, block_size: int, pass_tokens: int
) -> PagedModel:
    """Load a model folder; raises EngineError with the reason.

    `dtype` is a key of DTYPES or "auto" (float32 on the CPU, else the model's own dtype). `device`
    is a torch device name or "auto".
    """
    if not (folder / "config.json").is_file():
        raise EngineConfigError(
            f"{folder} is not a Hugging Face model folder: it has no config.json"
        )
    if not any(folder.glob("*.safetensors")):
        raise EngineConfigError(
            f"{folder} has no weights (*.safetensors), which the torch engine needs; "
            "`kvmesh model tiny DIR` writes a small model with random weights"
        )
    transformers_logging.disable_progress_bar()
    target = _device(device)
    chosen = DTYPES.get(dtype) or (torch.float32 if target.type == "cpu" else "auto")
    module, info = _from_pretrained(folder, chosen)
    missing = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if missing:
        raise EngineConfigError(
            f"the weights in {folder} do not fit its config.json: {_shortened(missing)}"
        )
    _check_supported(module.config)
    module.eval().to(target)
    return PagedModel(module, _stop_tokens(folder), block_size, pass_tokens)


def _from_pretrained(folder: Path, dtype: object) -> tuple[Any, dict[str, Any]]:
    try:
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except KeyError as error:
        reason = "its attention cannot be paged" if error.args == (NAME,) else repr(error)
        raise EngineConfigError(f"cannot load the model in {folder}: {reason}") from error
    except RuntimeError as error:  # may be temporary, e.g. out of memory
        raise EngineError(f"cannot load the model in {folder}: {error}") from error
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise EngineConfigError(f"cannot load the model in {folder}: {error}") from error
    return loaded


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineConfigError(f"unknown device {name!r}: {error}") from error
    try:
        torch.empty(0, device=device)
    except AssertionError as error:  # this build of torch lacks the device
        raise EngineConfigError(f"cannot use the device {name}: {error}") from error
    except RuntimeError as error:  # may be temporary, e.g. in use by another process
        raise EngineError(f"cannot use the device {name}: {error}") from error
    return device


def _check_supported(config: Any) -> None:
    """Refuse models that would give wrong results without an error."""
    text = config.get_text_config()
    unsupported = set(getattr(text, "layer_types", None) or ()) - _PLAIN_LAYERS
    if unsupported:
        raise EngineConfigError(
            f"the torch engine cannot page layers of type {_shortened(sorted(unsupported))}"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in _VARYING_ROPE:
        raise EngineConfigError(
            f"rope scaling {rope['rope_type']!r} depends on the longest sequence of a batch, "
            "so requests cannot share KV blocks"
        )


def _stop_tokens(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        content = json.loads(file.read_text()) if file.is_file() else {}
        found = content.get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def _fingerprint(module: nn.Module) -> str:
    """Hash of the name, the shape and the first FINGERPRINT_VALUES values of each weight."""
    digest = 0
    for name, weight in module.named_parameters():
        values = weight.detach().flatten()[:FINGERPRINT_VALUES].float().cpu().numpy().tobytes()
        digest = xxh3(f"{name}{list(weight.shape)}".encode() + values, digest)
    return f"{digest:016x}"


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
