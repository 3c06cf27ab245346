"""Items of tools that another server ran, or that only its clients know, as calls and results.

Their kinds are many and grow each year, but have one form: `X_call` holds what was asked, and often
what came of it; `X_output` holds the result of another item's call.
"""

from collections.abc import Container, Mapping
from typing import Any, Literal

from kvmesh.frontend.apis.base import as_json
from kvmesh.frontend.apis.content.files import file_kind
from kvmesh.frontend.apis.content.foreign import is_data, plain_text, shown_text
from kvmesh.frontend.apis.content.tagged import Foreign
from kvmesh.frontend.conversation import (
    AttachedFile,
    Message,
    ResultPart,
    Text,
    ToolCall,
    ToolResult,
)

_CALL, _OUTPUT = "_call", "_output"
_RESULTS = ("output", "outputs", "results", "result", "error")
_NOT_ARGUMENTS = frozenset(
    ("type", "id", "call_id", "status", "name", "server_label", "created_by", *_RESULTS)
)
_SCREENSHOT = "computer_screenshot"
_UNKNOWN = "[the result of this call was not sent]"


def hosted_messages(item: Foreign) -> list[Message]:
    """The messages of an item; empty for one that a prompt cannot hold."""
    kind = item["type"]
    call = next((c for c in (item.get("call_id"), item.get("id")) if isinstance(c, str)), "")
    if kind.endswith(_OUTPUT) and call:
        output = item["output"] if "output" in item else _without(item, _NOT_ARGUMENTS)
        return [Message("tool", [ToolResult(call, _shown(output))])]
    if not kind.endswith(_CALL):
        role: Literal["user", "assistant"] = "user" if item.get("role") == "user" else "assistant"
        return [Message(role, [Text(text)])] if (text := shown_text(item)) else []
    asked = _arguments(item)
    came = {key: item[key] for key in _RESULTS if item.get(key) is not None}
    if not came and not asked:
        return []
    name = item.get("name")
    tool = name if isinstance(name, str) and name else kind.removesuffix(_CALL)
    messages = [Message("assistant", [ToolCall(call, tool, asked or "{}")])]
    if came or not isinstance(item.get("call_id"), str):  # no other item has the result
        messages.append(Message("tool", [ToolResult(call, _result(kind, came), "error" in came)]))
    return messages


def _arguments(item: Mapping[str, Any]) -> str:
    """The text of all that was asked; empty if nothing was."""
    given = item.get("arguments")
    if isinstance(given, str):
        return given
    asked = _without(item, _NOT_ARGUMENTS)
    only = next(iter(asked.values())) if len(asked) == 1 else None
    return as_json(only if isinstance(only, dict) else asked) if asked else ""


def _without(item: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    return {k: v for k, v in item.items() if k not in names and v is not None}


def _result(kind: str, came: Mapping[str, Any]) -> list[ResultPart]:
    if not came:  # models expect one behind each call
        return [Text(_UNKNOWN)]
    if is_data(came.get("result")):
        return [AttachedFile(file_kind(kind) or "file")]
    return _shown(next(iter(came.values())) if len(came) == 1 else [*came.values()])


def _shown(output: Any) -> list[ResultPart]:
    if isinstance(output, dict) and output.get("type") == _SCREENSHOT:
        return [AttachedFile("screenshot")]
    text = plain_text(output)
    return [Text(text)] if text else []
