"""Tools as templates show them are kept for the next prompts."""

import json
import operator

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects.templates import sandbox
from kvmesh.frontend.dialects.templates.chat_template import ToolEntries
from kvmesh.frontend.dialects.tools import function

SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "description": "Größe"}}}


def tools(description: str = "Reads.") -> list[Tool]:
    return [
        Tool("read", description, SCHEMA),
        Tool("found", "", {}, deferred=True),
        Tool("patch", "", {}, "files", custom=True, grammar="start: /x/"),
    ]


def test_the_same_tools_have_the_same_entries() -> None:
    entries, listed = ToolEntries(), tools()
    made = entries.of(listed)
    assert made == [function(tool) for tool in listed if not tool.deferred]
    assert all(map(operator.is_, entries.of(listed), made))
    assert entries.of(tools("Writes.")) != made
    assert entries.of(listed[1:2]) == []


def test_each_form_of_their_json_is_that_of_plain_objects() -> None:
    entry = ToolEntries().of(tools())[0]
    for _ in range(2):
        for form in ({}, {"ensure_ascii": True}, {"indent": 4}, {"separators": [",", ":"]}):
            for sort_keys in (False, True):
                plain = sandbox.tojson(dict(entry), **form, sort_keys=sort_keys)
                assert sandbox.tojson(entry, **form, sort_keys=sort_keys) == plain
    assert json.loads(sandbox.tojson(entry)) == function(tools()[0])


def test_tools_that_are_not_json_are_not_kept() -> None:
    odd = [Tool("read", "", {"default": {1, 2}.union})]
    assert ToolEntries().of(odd)[0]["function"]["name"] == "read"
