"""What a structural tag leaves free."""

import json

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
