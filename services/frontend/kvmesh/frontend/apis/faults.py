"""Faults of bodies: the code of each in OpenAI's APIs, and floats where integers are expected."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

MISSING = "missing_required_parameter"
INVALID_TYPE = "invalid_type"
INVALID_VALUE = "invalid_value"
MAX_FIELDS = 8  # fields with floats in place of integers
_NOUNS = {"int": "integer", "float": "decimal", "str": "string"}
_BOUND = re.compile(r"Expected `(\w+)` (of length )?([<>])=? ([0-9.-]+)")
_FLOAT = re.compile(r"Expected `(?:[^`]* )?int(?: [^`]*)?`, got `float` - at `\$(.+)`")
_STEP = re.compile(r"\.([^.\[]+)|\[(?:\d+|\.\.\.)\]")


def code_of(reason: str) -> str:
    """The code of a fault that msgspec describes."""
    if (bound := _BOUND.match(reason)) is not None:
        kind, length, sign, limit = bound.groups()
        return bound_code(_NOUNS.get(kind, kind), sign == "<", bool(length), limit)
    if reason.startswith("Object missing required field"):
        return MISSING
    return INVALID_TYPE if ", got `" in reason else INVALID_VALUE


def bound_code(noun: str, above: bool, length: bool = False, limit: str = "") -> str:
    """The code of a number or a length that is `above` or below its `limit`."""
    if length and not above and limit == "1":
        return f"empty_{noun}"
    measure = "length" if length else "value"
    return f"{noun}_above_max_{measure}" if above else f"{noun}_below_min_{measure}"


def with_integers(body: bytes, fault: msgspec.ValidationError) -> bytes | None:
    """The body with integers for the whole floats (`30.0`) that the fault is about.

    None if it is about something else.
    """
    found = _FLOAT.fullmatch(str(fault))
    if found is None:
        return None
    decoded = msgspec.json.decode(body)
    steps = [step[1] for step in _STEP.finditer(found[1])]
    return msgspec.json.encode(decoded) if _replace(decoded, steps) else None


def _replace(value: Any, steps: list[str | None]) -> bool:
    """Replace whole floats at the path, where None stands for every item; True if one was there."""
    step, rest = steps[0], steps[1:]
    items: Sequence[Any] = ()
    if isinstance(value, list):
        items = range(len(value)) if step is None else ()
    elif isinstance(value, dict):
        items = list(value) if step is None else [step] if step in value else ()
    replaced = False
    for key in items:
        if rest:
            replaced |= _replace(value[key], rest)
        elif isinstance(value[key], float) and value[key].is_integer():
            value[key] = int(value[key])
            replaced = True
    return replaced
