"""Tools as templates show them, kept for the next prompts with the same tools."""

from threading import Lock

import msgspec

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects.templates.prompt_json import RepeatedEntry
from kvmesh.frontend.dialects.tools import function
from kvmesh.runtime.lru import LruCache

MEMO_BYTES = 16 << 20
SIZE = 8  # times the JSON of tools: about what they take in memory


class ToolEntries:
    """The entries of the lists of tools seen last, bounded by MEMO_BYTES. Thread-safe."""

    def __init__(self) -> None:
        self._lists: LruCache[bytes, list[RepeatedEntry]] = LruCache(MEMO_BYTES, _size)
        self._lock = Lock()

    def of(self, tools: list[Tool]) -> list[RepeatedEntry]:
        """An entry for each tool of the prompt's own section; not to be changed."""
        shown = [tool for tool in tools if not tool.deferred]
        if not shown:
            return []
        try:
            key = msgspec.json.encode(shown)
        except (msgspec.MsgspecError, TypeError, UnicodeError, OverflowError, RecursionError):
            return _entries(shown)
        with self._lock:
            known = self._lists.get(key)
        if known is None:
            known = _entries(shown)
            with self._lock:
                self._lists.put(key, known)
        return known


def _entries(tools: list[Tool]) -> list[RepeatedEntry]:
    return [RepeatedEntry(function(tool)) for tool in tools]


def _size(key: bytes, _: list[RepeatedEntry]) -> int:
    return SIZE * len(key)
