"""Loads a Hugging Face causal LM from a folder, or from the memory of the node."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

from kvmesh.weights.errors import WeightsLost
from kvmesh.worker.engine import EngineConfigError, EngineError
from kvmesh.worker.engines.torch.model.attention import NAME
from kvmesh.worker.engines.torch.model.node_weights import TorchWeights, plain_config

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FILES = "*.safetensors"
ARGUMENTS: dict[str, Any] = {
    "attn_implementation": NAME,
    "local_files_only": True,
    "trust_remote_code": False,
    "use_safetensors": True,
    "output_loading_info": True,
}
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
        module = _from_copy(weights, folder, chosen) if weights is not None else None
        if module is None:
            module = _from_files(weights, folder, chosen)
        if weights is not None:
            weights.keep(module)
    _check_supported(module.config)
    module.eval().to(target)
    return LoadedModel(module, _stop_tokens(folder))


def _from_copy(weights: TorchWeights, folder: Path, dtype: object) -> Any:
    """The model from tensors that may still be on their way; None if only files serve."""
    tensors = weights.arriving()
    if not tensors:
        return None
    with _as_engine_errors(folder):
        config = plain_config(folder)
    if config is None:
        return None
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # the class of a part, as of the text model of one that sees, has another configuration
    if getattr(model_class, "config_class", None) is not type(config):
        return None
    try:
        with _as_engine_errors(folder):
            loaded = model_class.from_pretrained(
                None, config=config, state_dict=tensors, dtype=dtype, **ARGUMENTS
            )
        return _complete(loaded, folder)
    except WeightsLost as error:
        weights.give_up(error)
    except (EngineError, TypeError, AttributeError) as error:
        log.warning(
            "transformers %s does not load tensors as they come, the model waits for all: %r",
            transformers_version,
            error,
        )
    return None


def _from_files(weights: TorchWeights | None, folder: Path, dtype: object) -> Any:
    """Load the files of the model in `folder`, or those that a copy has."""
    source = weights.folder() if weights is not None else folder
    if not any(source.glob(FILES)):
        if weights is not None and weights.shared:
            raise EngineError(f"no other worker gave the weights that {folder} lacks")
        raise EngineConfigError(
            f"{folder} has no weights (*.safetensors), which the torch engine needs; "
            "`kvmesh model tiny DIR` writes a small model with random weights"
        )
    with _as_engine_errors(folder):
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **ARGUMENTS)
    return _complete(loaded, folder)


def _complete(loaded: tuple[Any, dict[str, Any]], folder: Path) -> Any:
    """The loaded model; raises EngineConfigError if the weights lack a part of it."""
    module, info = loaded
    missing = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if missing:
        raise EngineConfigError(
            f"the weights in {folder} do not fit its config.json: {_shortened(missing)}"
        )
    return module


@contextmanager
def _as_engine_errors(folder: Path) -> Iterator[None]:
    """Errors of transformers as those of an engine."""
    try:
        yield
    except KeyError as error:
        reason = "its attention cannot be paged" if error.args == (NAME,) else repr(error)
        raise EngineConfigError(f"cannot load the model in {folder}: {reason}") from error
    except RuntimeError as error:  # may be temporary, e.g. out of memory
        raise EngineError(f"cannot load the model in {folder}: {error}") from error
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise EngineConfigError(f"cannot load the model in {folder}: {error}") from error


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
