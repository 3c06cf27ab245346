"""JSON serialization for prompts that does not hold the GIL for long."""

import json
from threading import Lock
from typing import Any

import msgspec

from kvmesh.runtime.lru import LruCache

MAX_VALUES_AT_ONCE = 8192  # values serialized in one call, which holds the GIL
MEMO_BYTES = 8 << 20
ENTRY_BYTES = 300
MAX_MEMO_ENTRY = 256 << 10


class RepeatedEntry(dict[str, Any]):
    """An object that each prompt of a session shows, such as a tool: its JSON is kept."""


class _Memo:
    """Texts by value and form. Thread-safe."""

    def __init__(self) -> None:
        self._texts: LruCache[tuple[bytes, str], str] = LruCache(MEMO_BYTES, _size)
        self._lock = Lock()

    def dumps(self, value: RepeatedEntry, form: dict[str, Any]) -> str:
        # another library's JSON identifies the value, and costs a tenth
        key = msgspec.json.encode(value), str(form)
        with self._lock:
            known = self._texts.get(key)
        if known is not None:
            return known
        text = dumps(dict(value), **form)
        if len(text) <= MAX_MEMO_ENTRY:
            with self._lock:
                self._texts.put(key, text)
        return text


def _size(key: tuple[bytes, str], text: str) -> int:
    return ENTRY_BYTES + len(key[0]) + len(text) * (1 if text.isascii() else 4)


_memo = _Memo()


def dumps_repeated(value: RepeatedEntry, **form: Any) -> str:
    """`dumps` of such an object."""
    try:
        return _memo.dumps(value, form)
    except (msgspec.MsgspecError, TypeError, UnicodeError, OverflowError):
        return dumps(dict(value), **form)


def dumps(value: Any, **form: Any) -> str:
    """Like `json.dumps`, by default without ASCII escapes."""
    form.setdefault("ensure_ascii", False)
    if form.get("indent") is not None or _few(value):
        return json.dumps(value, **form)
    return "".join(json.JSONEncoder(**form).iterencode(value))


def _few(value: Any) -> bool:
    left, waiting = MAX_VALUES_AT_ONCE, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list | tuple):
            left -= len(item)
            if left < 0:
                return False
            waiting += item.values() if isinstance(item, dict) else item
    return True
