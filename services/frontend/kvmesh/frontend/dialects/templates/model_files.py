"""Chat templates and special tokens in the files of a model folder."""

import json
from pathlib import Path
from typing import Any

from kvmesh.bus.storage.named_templates import template_name
from kvmesh.frontend.dialects.errors import TemplateError

DEFAULT = "default"
TOOL_USE = "tool_use"
_BUILTIN = Path(__file__).parent / "builtin"
# Models that are published with an encoder in Python, by their architecture: our template.
_ENCODERS = {
    "DeepseekV32ForCausalLM": "deepseek_v3_2",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v4_1",
    "KimiK3ForConditionalGeneration": "kimi_k3",
}
# DeepSeek V4.1 may name the architecture of V4.
_ENCODER_TYPES = {"deepseek_v41": "deepseek_v4_1"}


def sources(files: dict[str, bytes]) -> dict[str, str]:
    """Templates by name; `chat_template.jinja` takes precedence over the older files.

    Files of additional templates come beside either. Of models that are published with an encoder
    instead, our template that writes the same prompts.
    """
    named = {name: _text(files, file) for file in files if (name := template_name(file))}
    if found := _default(files) | named:
        return found
    kind = str(read_json(files, "config.json").get("model_type"))
    architecture = map(_ENCODERS.get, architectures(files))
    encoder = _ENCODER_TYPES.get(kind) or next(filter(None, architecture), None)
    if encoder is None:
        return {}
    return {DEFAULT: (_BUILTIN / f"{encoder}.jinja").read_text(encoding="utf-8")}


def _default(files: dict[str, bytes]) -> dict[str, str]:
    """The template of `chat_template.jinja`, else those of the older files."""
    if "chat_template.jinja" in files:
        return {DEFAULT: _text(files, "chat_template.jinja")}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = _named(read_json(files, name).get("chat_template"))
        if found:
            return found
    return {}


def architectures(files: dict[str, bytes]) -> list[str]:
    """The names of the model's classes in `config.json`; none without one. Raises TemplateError."""
    found = read_json(files, "config.json").get("architectures")
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def vocabulary(files: dict[str, bytes]) -> int:
    """The ids of the model's vocabulary by `config.json`, unused ones included; 0 if unknown."""
    config = read_json(files, "config.json")
    inner = config.get("text_config")
    sizes = (each.get("vocab_size") for each in (config, inner) if isinstance(each, dict))
    return max((size for size in sizes if isinstance(size, int)), default=0)


def special_tokens(files: dict[str, bytes]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, as text."""
    merged = read_json(files, "special_tokens_map.json") | read_json(files, "tokenizer_config.json")
    tokens = {key: _token(value) for key, value in merged.items() if key.endswith("_token")}
    return {key: text for key, text in tokens.items() if text is not None}


def read_json(files: dict[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in a file, {} if the folder lacks the file; raises TemplateError."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except ValueError as error:
        raise TemplateError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TemplateError(f"{name} is not a JSON object")
    return value


def _named(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, dict):
        return {str(name): str(source) for name, source in value.items()}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict) and "template" in entry]
        return {str(entry.get("name", DEFAULT)): str(entry["template"]) for entry in entries}
    return {}


def _token(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _text(files: dict[str, bytes], name: str) -> str:
    try:
        return files[name].decode()
    except UnicodeDecodeError as error:
        raise TemplateError(f"{name} is not UTF-8") from error
