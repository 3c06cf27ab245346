"""Arguments of calls as templates show them, kept for the next prompts with the same calls."""

from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

from kvmesh.frontend.conversation import Tool, ToolCall
from kvmesh.frontend.dialects.templates.prompt_json import RepeatedEntry
from kvmesh.frontend.dialects.tools import arguments, function
from kvmesh.runtime.lru import LruCache

MEMO_BYTES = 8 << 20
ENTRY_BYTES = 800
VALUE_BYTES = 120
TEXTS = 4  # the arguments' text, its parts, and what templates write of it


class ShownTools(NamedTuple):
    """The parts of prompts that many share: definitions of tools and arguments of calls."""

    definition: Callable[[Tool], dict[str, Any]]
    arguments: Callable[[ToolCall], dict[str, Any]]


PLAIN_TOOLS = ShownTools(function, arguments)


class CallArguments:
    """The arguments seen last, by tenant and text, bounded by MEMO_BYTES. Thread-safe."""

    def __init__(self) -> None:
        self._kept: LruCache[tuple[str, str], RepeatedEntry] = LruCache(MEMO_BYTES, _size)
        self._lock = Lock()

    def of(self, tenant: str, call: ToolCall) -> dict[str, Any]:
        """The arguments as an object, as `tools.arguments` makes it; not to be changed."""
        if call.custom:
            return arguments(call)
        key = tenant, call.arguments
        with self._lock:
            kept = self._kept.get(key)
        if kept is None:
            kept = RepeatedEntry(arguments(call))
            with self._lock:
                self._kept.put(key, kept)
        return kept


def _size(key: tuple[str, str], _: RepeatedEntry) -> int:
    text = key[1]
    values = text.count(",") + text.count(":") + text.count("[") + text.count("{")
    width = 1 if text.isascii() else 4
    return ENTRY_BYTES + TEXTS * width * len(text) + VALUE_BYTES * values
