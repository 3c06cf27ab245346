"""The same work on Dynamo's `RadixTree`, if `ai-dynamo-runtime` is importable."""

import importlib
import json
from types import ModuleType
from typing import Any

from index_workload import Event


def runtime() -> ModuleType | None:
    """Return Dynamo's native module, or None if it is not installed."""
    try:
        return importlib.import_module("dynamo._core")
    except ImportError:
        return None


def _words(buffer: bytes) -> list[int]:
    return list(memoryview(buffer).cast("Q"))


def stored(number: int, event: Event) -> bytes:
    blocks = [
        {"block_hash": engine, "tokens_hash": local}
        for engine, local in zip(_words(event.engine), _words(event.local), strict=True)
    ]
    return _encoded(number, {"stored": {"parent_hash": event.parent, "blocks": blocks}})


def removed(number: int, event: Event) -> bytes:
    return _encoded(number, {"removed": {"block_hashes": _words(event.engine)[::-1]}})


def _encoded(number: int, data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": number, "dp_rank": 0, "data": data}).encode()


def query(local: bytes, blocks: int) -> list[int]:
    return _words(local[: 8 * blocks])
