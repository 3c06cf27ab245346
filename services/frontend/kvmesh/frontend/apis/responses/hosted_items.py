"""Items of tools that another server ran, or that only its clients know, as calls and results.

Their kinds are many and grow each year, but have one form: `X_call` holds what was asked, and often
what came of it; `X_call_output` holds the result of another item's call.
"""

from collections.abc import Mapping
from typing import Any, Literal

from kvmesh.frontend.apis.base import as_json
from kvmesh.frontend.apis.content.foreign import plain_text
from kvmesh.frontend.apis.content.tagged import Foreign
from kvmesh.frontend.conversation import (
    AttachedFile,
    Message,
    ResultPart,
    Text,
    ToolCall,
    ToolResult,
)

_CALL, _OUTPUT = "_call", "_call_output"
_RESULTS = ("output", "outputs", "results", "result", "error")
_NOT_ARGUMENTS = frozenset(
    ("type", "id", "call_id", "status", "name", "server_label", "created_by", *_RESULTS)
)
_SCREENSHOT = "computer_screenshot"


def hosted_messages(item: Foreign) -> list[Message]:
    """The messages of an item; empty for one that a prompt cannot hold."""
    kind = item["type"]
    name = item.get("name")
    if kind.endswith(_OUTPUT) and isinstance(call := item.get("call_id"), str):
        return [Message("tool", [ToolResult(call, _shown(item.get("output")))])]
    if not kind.endswith(_CALL):
        texts = (item.get("text"), item.get("content"))
        found = next((text for text in texts if isinstance(text, str) and text), None)
        role: Literal["user", "assistant"] = "user" if item.get("role") == "user" else "assistant"
        return [Message(role, [Text(found)])] if found else []
    came = [item[key] for key in _RESULTS if item.get(key) is not None]
    call = next((c for c in (item.get("call_id"), item.get("id")) if isinstance(c, str)), "")
    if not came and not isinstance(item.get("call_id"), str):
        return []  # no result will follow, and models answer no call before its result
    tool = name if isinstance(name, str) and name else kind.removesuffix(_CALL)
    messages = [Message("assistant", [ToolCall(call, tool, _arguments(item))])]
    if came:
        shown = _shown(came[0] if len(came) == 1 else came)
        failed = item.get("error") is not None
        messages.append(Message("tool", [ToolResult(call, shown, failed)]))
    return messages


def _arguments(item: Mapping[str, Any]) -> str:
    given = item.get("arguments")
    if isinstance(given, str):
        return given
    asked = {k: v for k, v in item.items() if k not in _NOT_ARGUMENTS and v is not None}
    only = next(iter(asked.values())) if len(asked) == 1 else None
    return as_json(only if isinstance(only, dict) else asked)


def _shown(output: Any) -> list[ResultPart]:
    if isinstance(output, dict) and output.get("type") == _SCREENSHOT:
        return [AttachedFile("screenshot")]
    text = plain_text(output)
    return [Text(text)] if text else []
