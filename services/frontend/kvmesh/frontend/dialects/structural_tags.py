"""Structural tags: constraints for free text whose tool calls must match their schemas.

The format is xgrammar's `triggered_tags`. Only families that write arguments as JSON between fixed
markers have one.
"""

from typing import Any

from msgspec import Struct

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects.tools import by_model_name, schema

NAME = "NAME"


class CallTag(Struct, frozen=True):
    """The form of a call: `begin`, with NAME for the function's name, arguments, `end`.

    `begin` starts with `trigger`, which models write for nothing else. If `numbered` is set, the
    call's number and that text follow `begin`.
    """

    trigger: str
    begin: str
    end: str
    numbered: str | None = None


# By tool-call parser: exactly the form that the models were trained to write.
CALL_TAGS = {
    "hermes": CallTag(
        "<tool_call>",
        '<tool_call>\n{"name": "NAME", "arguments": ',
        "}\n</tool_call>",
    ),
    "functionary": CallTag("<function=", "<function=NAME>", "</function>"),
    "deepseek_v3": CallTag(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        "\n```<｜tool▁call▁end｜>",
    ),
    "deepseek_v3_1": CallTag(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ),
    "kimi_k2": CallTag(
        "<|tool_call_begin|>",
        "<|tool_call_begin|>functions.NAME:",
        "<|tool_call_end|>",
        numbered="<|tool_call_argument_begin|>",
    ),
}


def call_tags(parser: str | None, tools: list[Tool]) -> dict[str, Any] | None:
    """The structural tag for calls of `tools` in the form of `parser`; None if it has none.

    Arguments of strict tools must match their schema; those of others, any JSON object.
    """
    form = CALL_TAGS.get(parser or "")
    if form is None:
        return None
    tags = [_tag(form, name, tool) for name, tool in by_model_name(tools).items()]
    calls = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags}
    return {"type": "structural_tag", "format": calls}


def _tag(form: CallTag, name: str, tool: Tool) -> dict[str, Any]:
    arguments = schema(tool) if tool.strict else {}
    arguments = arguments or {"type": "object"}
    content: dict[str, Any] = {"type": "json_schema", "json_schema": arguments}
    if form.numbered is not None:
        number = {"type": "regex", "pattern": "[0-9]+"}
        text = {"type": "const_string", "value": form.numbered}
        content = {"type": "sequence", "elements": [number, text, content]}
    begin = form.begin.replace(NAME, name)
    return {"type": "tag", "begin": begin, "content": content, "end": form.end}
