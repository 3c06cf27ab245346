"""Free text in which every tool call fits its schema: structural tags for families of models.

The form is xgrammar's (`triggered_tags`). Only families that write the arguments as JSON between
fixed markers have one.
"""

from typing import Any

from msgspec import Struct

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects.tools import by_model_name, schema

NAME = "NAME"


class CallTag(Struct, frozen=True):
    """`begin`, in which NAME stands for the function's name, the arguments, `end`.

    `begin` starts with `trigger`, which models write for nothing else. With `numbered` the call's
    number and that text follow `begin`.
    """

    trigger: str
    begin: str
    end: str
    numbered: str | None = None


# By tool-call parser: exactly what the models were trained to write.
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
    """The structural tag for calls of `tools`, as `parser` reads them; None if it has no form.

    Strict tools get their own schema, others any object.
    """
    form = CALL_TAGS.get(parser or "")
    if form is None:
        return None
    tags = [_tag(form, name, tool) for name, tool in by_model_name(tools).items()]
    calls = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags}
    return {"type": "structural_tag", "format": calls}


def _tag(form: CallTag, name: str, tool: Tool) -> dict[str, Any]:
    wanted = schema(tool) if tool.strict else {}
    content: dict[str, Any] = {"type": "json_schema", "json_schema": wanted or {"type": "object"}}
    if form.numbered is not None:
        number = {"type": "regex", "pattern": "[0-9]+"}
        text = {"type": "const_string", "value": form.numbered}
        content = {"type": "sequence", "elements": [number, text, content]}
    begin = form.begin.replace(NAME, name)
    return {"type": "tag", "begin": begin, "content": content, "end": form.end}
