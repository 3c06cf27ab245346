"""Writing JSON into prompts without making other threads wait."""

import json
from typing import Any

MANY = 8192  # values that are written in one call, which no other thread interrupts


def dumps(value: Any, **form: Any) -> str:
    """As `json.dumps` writes it, and without ASCII escapes unless they are asked for."""
    form.setdefault("ensure_ascii", False)
    if form.get("indent") is not None or _few(value):
        return json.dumps(value, **form)
    return "".join(json.JSONEncoder(**form).iterencode(value))


def _few(value: Any) -> bool:
    left, waiting = MANY, [value]
    while waiting:
        held = waiting.pop()
        if isinstance(held, dict | list | tuple):
            left -= len(held)
            if left < 0:
                return False
            waiting += held.values() if isinstance(held, dict) else held
    return True
