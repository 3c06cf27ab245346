"""Tools and calls as text, for models whose chat template cannot show them.

The system message lists the tools and the form in which the model must call them, past calls are
shown in the same form: that which the model's parser reads.
"""

import re
from typing import Any, NamedTuple

from kvmesh.frontend.dialects.families import by_template
from kvmesh.frontend.dialects.templates.prompt_json import dumps

HERMES = "hermes"
_NAME, _ARGUMENTS, _ID = "NAME", "ARGUMENTS", "ID"


class _CallText(NamedTuple):
    """A call with its NAME, ARGUMENTS and ID, and the texts around and between several calls."""

    call: str
    begin: str = ""
    between: str = ""
    end: str = ""


_JSON = '{"name": "NAME", "arguments": ARGUMENTS}'
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>")

# By tool-call parser.
_CALL_TEXTS = {
    HERMES: _CallText(f"<tool_call>\n{_JSON}\n</tool_call>", between="\n"),
    "mistral": _CallText(_JSON, "[TOOL_CALLS][", ", ", "]"),
    "functionary": _CallText("<function=NAME>ARGUMENTS</function>"),
    "nemotron_deci": _CallText(_JSON, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "jamba": _CallText(_JSON, "<tool_calls>[", ", ", "]</tool_calls>"),
    "deepseek_v3": _CallText(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        *_DEEPSEEK,
    ),
    "deepseek_v3_1": _CallText(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>", *_DEEPSEEK
    ),
    "kimi_k2": _CallText(
        "<|tool_call_begin|>ID<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
}

_PLACES = re.compile(f"({_NAME}|{_ARGUMENTS}|{_ID})")
_TEXT = """You can call functions. These are their signatures, one JSON object a line:
<tools>
{tools}
</tools>

To call one, write this and nothing behind it, with its NAME and its ARGUMENTS as a JSON object:
{form}"""


def plain_parser(source: str) -> str:
    """The tool-call parser whose form the instructions describe; `source`: the template's text."""
    family = (by_template(source) or (None,))[0]
    return family if family in _CALL_TEXTS else HERMES


def instructions(tools: list[dict[str, Any]], parser: str) -> str:
    """The section that describes `tools` (OpenAI function objects) in a system message."""
    form = _CALL_TEXTS[parser]
    call = form.call.replace(_ID, "functions.NAME:0")
    lines = (dumps(tool["function"]) for tool in tools)
    return _TEXT.format(tools="\n".join(lines), form=f"{form.begin}{call}{form.end}")


def calls_text(calls: list[dict[str, Any]], parser: str) -> str:
    """Past calls (OpenAI call objects) as the model writes them."""
    form = _CALL_TEXTS[parser]
    return form.begin + form.between.join(_written(form.call, call) for call in calls) + form.end


def _written(form: str, call: dict[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    texts = {
        _NAME: function["name"],
        _ARGUMENTS: arguments if isinstance(arguments, str) else dumps(arguments),
        _ID: call["id"],
    }
    return _PLACES.sub(lambda match: texts[match[0]], form)
