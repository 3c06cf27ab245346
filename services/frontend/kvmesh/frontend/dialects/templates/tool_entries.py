"""Tools as templates show them, kept for the next prompts with the same tools."""

from threading import Lock
from typing import NamedTuple

import msgspec

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects.templates.control_tokens import NO_CONTROL, ControlTokens
from kvmesh.frontend.dialects.templates.prompt_json import RepeatedEntry
from kvmesh.frontend.dialects.tools import function
from kvmesh.runtime.lru import LruCache

MEMO_BYTES = 48 << 20
SIZE = 24  # times the JSON of a tool: at most what its entry takes in memory


class _Kept(NamedTuple):
    """An entry with its tool, whose id thus stays its own."""

    tool: Tool
    entry: RepeatedEntry
    guarded: bool


class ToolEntries:
    """The entries of the tools seen last, by their identity, bounded by MEMO_BYTES. Thread-safe."""

    def __init__(self, control: ControlTokens = NO_CONTROL) -> None:
        self._control = control
        self._kept: LruCache[int, _Kept] = LruCache(MEMO_BYTES, _size)
        self._lock = Lock()

    def of(self, tools: list[Tool]) -> list[RepeatedEntry]:
        """An entry for each tool of the prompt's own section; not to be changed."""
        with self._lock:
            return [self._entry(tool).entry for tool in tools if not tool.deferred]

    def entry(self, tool: Tool) -> RepeatedEntry:
        """The entry of any tool; not to be changed."""
        with self._lock:
            return self._entry(tool).entry

    def guarded(self, tools: list[Tool]) -> bool:
        """True if an entry has guards of control tokens."""
        with self._lock:
            return any(self._entry(tool).guarded for tool in tools)

    def _entry(self, tool: Tool) -> _Kept:
        kept = self._kept.get(id(tool))
        if kept is None:
            plain = function(tool)
            shown = self._control.guard_json(plain)
            kept = _Kept(tool, RepeatedEntry(shown), shown is not plain)
            self._kept.put(id(tool), kept)
        return kept


def _size(_: int, kept: _Kept) -> int:
    try:
        return SIZE * len(msgspec.json.encode(kept.entry))
    except (msgspec.MsgspecError, TypeError, UnicodeError, OverflowError, RecursionError):
        return MEMO_BYTES + 1  # not kept
