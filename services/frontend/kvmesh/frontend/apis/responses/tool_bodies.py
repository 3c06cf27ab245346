"""Tools of a Responses request, and the choice among them."""

from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from kvmesh.frontend.apis.base import missing
from kvmesh.frontend.apis.chat.body import OWN_TOOLS, AllowedTool, Grammar, allowed_choice
from kvmesh.frontend.apis.tool_definitions import ToolDefinitions
from kvmesh.frontend.conversation import Tool, ToolChoice
from kvmesh.frontend.errors import InvalidRequest


class ResponsesFormat(Grammar):
    """The grammar of a custom tool, which chat completions have in a field of its own."""

    type: Literal["text", "grammar"] | None = None


class ResponsesToolBody(Struct):
    """A tool, or a namespace with its functions in `tools`."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ResponsesFormat | None = None
    defer_loading: bool | None = None
    tools: "list[ResponsesToolBody] | None" = None


class ResponsesToolChoice(Struct, omit_defaults=True):
    """A named tool, or with the type `allowed_tools` several."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


def _tools(tool: ResponsesToolBody, where: str) -> list[Tool]:
    """A function or custom tool, or the functions of a namespace; nothing of a hosted tool."""
    listed, space = ([tool], None) if tool.type != "namespace" else (tool.tools or [], tool.name)
    return [made for each in listed if (made := _one_tool(each, space, where)) is not None]


def _one_tool(tool: ResponsesToolBody, namespace: str | None, where: str) -> Tool | None:
    if tool.type not in OWN_TOOLS:
        return None
    if not tool.name:
        raise missing(f"{where}.name")
    description = tool.description or ""
    if tool.type == "custom":
        form = tool.format or ResponsesFormat()
        text, regex = form.definition, form.syntax == "regex"
        made = Tool(tool.name, description, {}, namespace, custom=True, grammar=text, regex=regex)
        return replace(made, deferred=bool(tool.defer_loading))
    return Tool(
        tool.name,
        description,
        tool.parameters or {},
        namespace,
        strict=bool(tool.strict),
        deferred=bool(tool.defer_loading),
    )


definitions = ToolDefinitions(ResponsesToolBody, (*OWN_TOOLS, "namespace"), _tools)


def tool_choice(choice: str | ResponsesToolChoice | None) -> ToolChoice:
    if isinstance(choice, ResponsesToolChoice):
        if choice.type in OWN_TOOLS:
            if not choice.name:
                raise missing("tool_choice.name")
            return ToolChoice("required", (choice.name,))
        if choice.type != "allowed_tools":
            reason = f"`tool_choice`: no tool of type `{choice.type}` can be called here."
            raise InvalidRequest(reason, "tool_choice")
        if choice.tools is None:
            raise missing("tool_choice.tools")
        return allowed_choice(choice.mode or "auto", choice.tools)
    if choice == "required":
        return ToolChoice("required")
    return ToolChoice("none") if choice == "none" else ToolChoice()
