"""Tools as models see them: one flat list of functions for all APIs."""

import json
from typing import Any

from kvmesh.frontend.conversation import Tool, ToolCall

CUSTOM_INPUT = "input"
SEPARATOR = "__"


def model_name(name: str, namespace: str | None) -> str:
    """The name by which a model calls a tool, including its namespace."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def by_model_name(tools: list[Tool]) -> dict[str, Tool]:
    return {model_name(tool.name, tool.namespace): tool for tool in tools}


def schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments; a free-text tool takes one string."""
    if not tool.custom:
        return tool.parameters
    kind = "regular expression" if tool.regex else "grammar"
    text = f"Text that matches this {kind}:\n{tool.grammar}" if tool.grammar else "Free text."
    field = {"type": "string", "description": text}
    return {"type": "object", "properties": {CUSTOM_INPUT: field}, "required": [CUSTOM_INPUT]}


def function(tool: Tool) -> dict[str, Any]:
    """The tool in the form of the OpenAI chat API, as chat templates expect it."""
    inner = {
        "name": model_name(tool.name, tool.namespace),
        "description": tool.description,
        "parameters": schema(tool),
    }
    return {"type": "function", "function": inner}


def arguments(call: ToolCall) -> dict[str, Any]:
    """A call's arguments as an object; text that is not JSON is wrapped in one."""
    if call.custom:
        return {CUSTOM_INPUT: call.arguments}
    if not call.arguments.strip():
        return {}
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {CUSTOM_INPUT: call.arguments}
    return value if isinstance(value, dict) else {CUSTOM_INPUT: value}
