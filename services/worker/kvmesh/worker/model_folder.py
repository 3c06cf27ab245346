"""Settings of a Hugging Face model folder that engines need before they start."""

import json
from pathlib import Path
from typing import Any

from kvmesh.bus.storage.named_templates import additional_templates
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.engine import EngineConfigError

DEFAULT_CONTEXT = 131072
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


def model_context(folder: Path) -> int:
    """Longest sequence in tokens, from config.json or tokenizer_config.json; else 131,072."""
    config = read_json(folder / "config.json")
    nested = [config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), dict)]
    for section in (config, *nested):
        length = section.get("max_position_embeddings")
        if isinstance(length, int) and length > 0:
            return length
    length = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return length if isinstance(length, int) and 0 < length < 1 << 31 else DEFAULT_CONTEXT


def has_chat_template(folder: Path) -> bool:
    """True if a file of the folder contains one."""
    older = ("chat_template.json", "tokenizer_config.json")
    named = (folder / "chat_template.jinja").is_file() or additional_templates(folder)
    return bool(named) or any(read_json(folder / name).get("chat_template") for name in older)


def check_weights(model: str, load_format: str) -> None:
    """Raise EngineConfigError if a folder has no weights of the kinds that engines look for.

    An engine would find that out in the midst of its start, each time that it is started. Formats
    other than the default may need no such files.
    """
    folder = Path(model)
    if load_format != "auto" or not folder.is_dir():
        return
    if not any(file.suffix in WEIGHT_SUFFIXES for file in folder.iterdir()):
        kinds = ", ".join(f"*{suffix}" for suffix in WEIGHT_SUFFIXES)
        raise EngineConfigError(
            f"{folder} has no weights ({kinds}); with weights.share other workers may give them"
        )


def weights_revision(worker: WorkerSettings, folder: Path) -> str:
    """The revision of the weights as far as it is known; else empty."""
    return worker.revision or _snapshot(folder)


def _snapshot(folder: Path) -> str:
    """The revision of a folder in the Hugging Face cache; empty for any other folder."""
    real = folder.resolve()
    return real.name if real.parent.name == "snapshots" else ""


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file, empty if there is none; raises EngineConfigError."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EngineConfigError(f"cannot read {file}: {error}") from error
    return content if isinstance(content, dict) else {}
