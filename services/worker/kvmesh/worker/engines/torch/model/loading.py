"""Loads a Hugging Face causal LM from a folder, or from the memory of the node."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from kvmesh.worker.engine import EngineConfigError, EngineError
from kvmesh.worker.engines.torch.model.attention import NAME
from kvmesh.worker.engines.torch.model.node_weights import TorchWeights

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FILES = "*.safetensors"
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
_VARYING_ROPE = {"dynamic", "longrope"}


class LoadedModel(NamedTuple):
    """A model with its weights on its device, and the tokens that end an output."""

    module: nn.Module
    stop_tokens: frozenset[int]


def load_model(
    folder: Path, dtype: str, device: str, weights: TorchWeights | None = None
) -> LoadedModel:
    """Load a model folder; raises EngineError with the reason.

    `dtype` is a key of DTYPES or "auto" (float32 on the CPU, else the model's own dtype). `device`
    is a torch device name or "auto". `weights`, which the caller closes once the model has ended,
    may have what the folder lacks.
    """
    if not (folder / "config.json").is_file():
        raise EngineConfigError(
            f"{folder} is not a Hugging Face model folder: it has no config.json"
        )
    transformers_logging.disable_progress_bar()
    target = _device(device)
    chosen = DTYPES.get(dtype) or (torch.float32 if target.type == "cpu" else "auto")
    module = weights.from_memory(chosen) if weights is not None else None
    if module is None:
        source = weights.folder() if weights is not None else folder
        if weights is not None and weights.shared and not any(source.glob(FILES)):
            raise EngineError(f"no other worker gave the weights that {folder} lacks")
        module = _from_files(source, folder, chosen)
        if weights is not None:
            weights.keep(module)
    _check_supported(module.config)
    module.eval().to(target)
    return LoadedModel(module, _stop_tokens(folder))


def _from_files(source: Path, folder: Path, dtype: object) -> Any:
    """Load the files in `source`, which are those of the model in `folder`."""
    if not any(source.glob(FILES)):
        raise EngineConfigError(
            f"{folder} has no weights (*.safetensors), which the torch engine needs; "
            "`kvmesh model tiny DIR` writes a small model with random weights"
        )
    module, info = _from_pretrained(source, folder, dtype)
    missing = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if missing:
        raise EngineConfigError(
            f"the weights in {folder} do not fit its config.json: {_shortened(missing)}"
        )
    return module


def _from_pretrained(source: Path, folder: Path, dtype: object) -> tuple[Any, dict[str, Any]]:
    try:
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
            source,
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


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
