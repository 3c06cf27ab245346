"""JSON serialization for prompts that does not hold the GIL for long."""

import json
from typing import Any

MAX_VALUES_AT_ONCE = 8192  # values serialized in one call, which holds the GIL
MAX_FORMS = 4


class RepeatedEntry(dict[str, Any]):
    """An object that many prompts show, such as a tool: its JSON is kept in each form."""

    __slots__ = ("_texts",)

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__(value)
        self._texts: dict[object, str] = {}

    def dumps(self, **form: Any) -> str:
        """The object as `dumps` writes it."""
        key = tuple(form.values())
        known = self._texts.get(key)
        if known is None:
            known = dumps(dict(self), **form)
            if len(self._texts) < MAX_FORMS:
                self._texts[key] = known
        return known


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
