"""Generates a text that satisfies a constraint, as a model under guided decoding would."""

import json
from random import Random

from kvmesh.bus.messages import Guided
from kvmesh.worker.engines.mock.text.regex import RegexError, matching_string
from kvmesh.worker.engines.mock.text.schema import SchemaError, SchemaWriter, words

# a schema may have any JSON in place of a list, an object or a number
_FAULTS = (
    *(SchemaError, RegexError, ValueError, RecursionError),
    *(TypeError, AttributeError, LookupError, ArithmeticError),
)


class UnsupportedConstraint(Exception):
    """The constraint is malformed, or of a kind that the mock cannot follow."""


def generate(guided: Guided, rng: Random) -> str:
    """A text that `guided` allows, determined by the state of `rng`.

    Raises UnsupportedConstraint.
    """
    try:
        return _generate(guided, rng)
    except _FAULTS as error:
        raise UnsupportedConstraint(f"cannot follow this {guided.kind}: {error}") from error


def _generate(guided: Guided, rng: Random) -> str:
    match guided.kind:
        case "json_object":
            return json.dumps({"answer": words(rng, 6)})
        case "json_schema":
            return _json(json.loads(guided.value), rng)
        case "choice":
            return rng.choice(_choices(guided.value))
        case "regex":
            return matching_string(guided.value, rng)
        case "structural_tag":
            return _structural(json.loads(guided.value), rng)
        case _:
            raise ValueError("the mock engine has no grammars")


def _json(schema: object, rng: Random) -> str:
    return json.dumps(SchemaWriter(schema, rng).write(), ensure_ascii=False)


def _choices(value: str) -> list[str]:
    choices = json.loads(value)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise ValueError("choices must be a JSON array of strings")
    return choices


def _structural(tag: object, rng: Random) -> str:
    """xgrammar's structural tags: `format` trees, and the older flat `structures`."""
    if isinstance(tag, dict) and isinstance(tag.get("format"), dict):
        return _format(tag["format"], rng)
    if isinstance(tag, dict) and isinstance(tag.get("structures"), list) and tag["structures"]:
        chosen = rng.choice(tag["structures"])
        return f"{chosen['begin']}{_json(chosen['schema'], rng)}{chosen['end']}"
    raise ValueError("a structural tag needs `format` or `structures`")


def _format(node: dict[str, object], rng: Random) -> str:
    match node:
        case {"type": "const_string", "value": str(value)}:
            return value
        case {"type": "json_schema", "json_schema": schema}:
            return _json(schema, rng)
        case {"type": "regex", "pattern": str(pattern)}:
            return matching_string(pattern, rng)
        case {"type": "any_text"}:
            return words(rng, 8)
        case {"type": "sequence", "elements": list(elements)}:
            return "".join(_format(element, rng) for element in elements)
        case {"type": "or", "elements": list(elements)} if elements:
            return _format(rng.choice(elements), rng)
        case {"type": "tag", "begin": str(begin), "content": dict(content), "end": str(end)}:
            return begin + _format(content, rng) + end
        case {"type": "triggered_tags", "tags": list(tags)} if tags:
            return _format(rng.choice(tags), rng) if node.get("at_least_one") else words(rng, 8)
        case {"type": "tags_with_separator", "tags": list(tags)} if tags:
            if node.get("stop_after_first") or node.get("at_least_one"):
                return _format(rng.choice(tags), rng)
            separator = str(node.get("separator", ""))
            return separator.join(_format(tag, rng) for tag in tags)
    raise ValueError(f"unknown structural tag {node.get('type')!r}")
