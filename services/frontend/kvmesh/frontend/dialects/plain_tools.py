"""Tool descriptions for models whose chat template cannot show tools.

The system message lists the tools and the form in which the model must call them: that of its
family if the template shows calls in that form, else that of Hermes.
"""

from typing import Any

from kvmesh.frontend.dialects.families import by_template
from kvmesh.frontend.dialects.templates.prompt_json import dumps

HERMES = "hermes"

# Syntax of a call, by tool-call parser; the model replaces NAME and ARGUMENTS.
CALL_FORMS = {
    HERMES: '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n"
    "```json\nARGUMENTS\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "jamba": '<tool_calls>[{"name": NAME, "arguments": ARGUMENTS}]</tool_calls>',
}

_TEXT = """You can call functions. These are their signatures, one JSON object a line:
<tools>
{tools}
</tools>

To call one, write this and nothing behind it, with its NAME and its ARGUMENTS as a JSON object:
{form}"""


def plain_parser(source: str, shows_calls: bool) -> str:
    """The tool-call parser whose form the instructions describe; `source`: the template's text."""
    found = by_template(source)
    family = found[0] if found and shows_calls else None
    return family if family in CALL_FORMS else HERMES


def instructions(tools: list[dict[str, Any]], parser: str) -> str:
    """The section that describes `tools` (OpenAI function objects) in a system message."""
    lines = (dumps(tool["function"]) for tool in tools)
    return _TEXT.format(tools="\n".join(lines), form=CALL_FORMS[parser])
