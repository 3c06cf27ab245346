"""Parts of structural tags."""

import json

from kvmesh.bus.messages import Guided
from kvmesh.worker.constraints.structural_tags import constraints_within


def test_every_constraint_within_a_tag_is_found() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "regex", "pattern": "no constraint"}}}
    tags = [
        {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "a+"}, "end": ""},
        {"type": "json_schema", "json_schema": schema},
        {"type": "or", "elements": [{"type": "grammar", "grammar": 'root ::= "b"'}]},
    ]
    form = {"type": "triggered_tags", "triggers": ["<"], "tags": tags}
    value = json.dumps({"type": "structural_tag", "format": form})
    found = constraints_within(Guided(kind="structural_tag", value=value))
    assert {(each.kind, each.value) for each in found} == {
        ("regex", "a+"),
        ("json_schema", json.dumps(schema)),
        ("grammar", 'root ::= "b"'),
    }


def test_another_constraint_contains_none() -> None:
    assert not list(constraints_within(Guided(kind="regex", value="(a")))
