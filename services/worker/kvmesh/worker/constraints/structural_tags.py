"""Parts of structural tags."""

import json
from collections.abc import Iterator

from kvmesh.bus.messages import Guided


def allows_free_text(guided: Guided) -> bool:
    """True if any text without a call satisfies the constraint: tags that only a trigger begins."""
    if guided.kind != "structural_tag":
        return False
    try:
        tag = json.loads(guided.value)
    except ValueError:
        return False
    match tag:
        case {"format": {"type": "triggered_tags", "tags": [_, *_], **options}}:
            return not options.get("at_least_one")
    return False


def constraints_within(guided: Guided) -> Iterator[Guided]:
    """The regular expressions, grammars and schemas that a structural tag contains.

    An engine that refuses the tag may not say which of them it refuses.
    """
    if guided.kind != "structural_tag":
        return
    pending = [json.loads(guided.value)]
    while pending:
        part = pending.pop()
        match part:
            case {"type": "regex", "pattern": str(value)}:
                yield Guided(kind="regex", value=value)
            case {"type": "grammar", "grammar": str(value)}:
                yield Guided(kind="grammar", value=value)
            case {"type": "json_schema", "json_schema": schema}:
                yield Guided(kind="json_schema", value=json.dumps(schema))
            case dict():
                pending += part.values()
            case list():
                pending += part
