"""The cards that a worker publishes about its model and itself."""

import json
import os
import time
from hashlib import sha256
from pathlib import Path

from kvmesh.bus.messages import Instance, ModelCard, Role
from kvmesh.bus.storage.named_templates import additional_templates, template_name
from kvmesh.bus.storage.tokenizer_file import PIECES, RANKS, TOKENIZER, tokenizer_files
from kvmesh.hashing import HASH_VERSION
from kvmesh.runtime.service import VERSION
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.engine import EngineConfigError, EngineInfo
from kvmesh.worker.model_folder import read_json, weights_revision

DIGITS = 12
_TEMPLATE = (
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
_WHOLE = (TOKENIZER, RANKS, PIECES, "chat_template.jinja")
_NOTES = ("_name_or_path", "name_or_path", "transformers_version")


def model_card(worker: WorkerSettings, folder: Path, info: EngineInfo, files: str) -> ModelCard:
    """The card of a model; dialects come from the settings, else from the folder's kvmesh.json."""
    hints = read_json(folder / "kvmesh.json")
    return ModelCard(
        name=worker.served_name or folder.name,
        context=info.context,
        block_size=info.block_size,
        files=files,
        adapters=info.adapters,
        structural_tags=info.structural_tags,
        exempts_thinking=info.exempts_thinking,
        tool_parser=worker.tool_parser or hints.get("tool_parser"),
        reasoning_parser=worker.reasoning_parser or hints.get("reasoning_parser"),
        hash_version=HASH_VERSION,
        tokenizer=_digest(folder, *tokenizer_files(folder)),
        template=_digest(folder, *_TEMPLATE, *additional_templates(folder)),
        config=_digest(folder, "config.json", "generation_config.json"),
        revision=weights_revision(worker, folder),
        kv_layout=info.kv_layout,
        task=info.task,
        image_placeholder=info.image_placeholder,
    )


def _digest(folder: Path, *names: str) -> str:
    """Digest of those of the named files that exist; empty if none does.

    JSON objects count by content, without notes of the library that wrote them.
    """
    digest, found = sha256(), False
    for name in names:
        file = folder / name
        if file.is_file():
            content = file.read_bytes() if _is_whole(name) else _content(file)
            digest.update(f"{name} {len(content)}\n".encode() + content)
            found = True
    return digest.hexdigest()[:DIGITS] if found else ""


def _is_whole(name: str) -> bool:
    return name in _WHOLE or bool(template_name(name))


def _content(file: Path) -> bytes:
    content = {key: value for key, value in read_json(file).items() if key not in _NOTES}
    return json.dumps(content, sort_keys=True).encode()


def instance_card(
    worker: WorkerSettings,
    info: EngineInfo,
    model: ModelCard,
    instance: str,
    name: str,
    sleeps: bool = False,
) -> Instance:
    """The card of a worker that serves `model`, and that can sleep if it `sleeps`."""
    return Instance(
        instance=instance,
        role=Role.WORKER,
        name=name,
        version=VERSION,
        started=time.time(),
        model=model,
        capacity=info.capacity,
        engine=info.name,
        serves=worker.serves,
        needs_handoff=info.needs_handoff,
        labels=card_labels(worker),
        node=node_name(worker) if info.tiered else "",
        sleeps=sleeps,
    )


def parked_card(worker: WorkerSettings, model: str, instance: str, name: str) -> Instance:
    """The card of a parked worker, which will serve the model of that name."""
    return Instance(
        instance=instance,
        role=Role.PARKED,
        name=name,
        version=VERSION,
        started=time.time(),
        engine=worker.engine,
        serves=worker.serves,
        labels=card_labels(worker),
        parked_for=model,
    )


def node_name(worker: WorkerSettings) -> str:
    """The machine whose kvbm a worker uses."""
    return worker.node or os.uname().nodename


def card_labels(worker: WorkerSettings) -> dict[str, str]:
    """The labels of a worker's card; raises EngineConfigError unless each is `key=value`."""
    labels: dict[str, str] = {}
    for text in worker.labels:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise EngineConfigError(f"label {text!r} is not of the form key=value")
        labels[key] = value
    return labels
