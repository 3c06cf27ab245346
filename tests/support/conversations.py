"""The earlier request of a client that a later one continues, from their bodies alone."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

Body = dict[str, Any]
ANSWER = "answer"
OWN_ITEMS = {"reasoning", "function_call", "custom_tool_call", "item_reference"}
BILLING = "x-anthropic-billing-header"  # differs in every request; no prompt holds it


def outline(body: Body) -> list[str]:
    """A body of any of the APIs as one entry for its fixed part and one per turn of its talk.

    An answer's entry names its calls and not its text, since clients drop or rewrite the rest.
    """
    items = _items(body)
    fixed = [body.get("system"), body.get("instructions"), *_tools(body)]
    entries = [_digest(fixed)]
    for item in items:
        if not _is_answer(item):
            entries.append(_digest(item))
        elif entries[-1].startswith(ANSWER):
            entries[-1] += _calls(item)
        else:
            entries.append(ANSWER + _calls(item))
    return entries


def predecessor(outlines: Sequence[list[str]], at: int) -> int | None:
    """The index of the request that request `at` continues with the answer to it, if any."""
    mine = outlines[at]
    found = [
        index
        for index, earlier in enumerate(outlines[:at])
        if mine[: len(earlier)] == earlier and "".join(mine[len(earlier) :]).startswith(ANSWER)
    ]
    return max(found, key=lambda index: (len(outlines[index]), index), default=None)


def _items(body: Body) -> list[Body]:
    given = body.get("messages", body.get("input", []))
    return given if isinstance(given, list) else [{"role": "user", "content": given}]


def _tools(body: Body) -> Iterable[str]:
    for tool in body.get("tools") or []:
        if not tool.get("defer_loading"):
            yield tool.get("name") or tool.get("function", {}).get("name") or tool["type"]


def _is_answer(item: Body) -> bool:
    return item.get("role") == "assistant" or item.get("type") in OWN_ITEMS


def _calls(item: Body) -> str:
    calls = [call["id"] for call in item.get("tool_calls") or []]
    if isinstance(item.get("content"), list):
        calls += [block["id"] for block in item["content"] if block.get("type") == "tool_use"]
    if "call_id" in item:
        calls.append(item["call_id"])
    return "".join(f" {call}" for call in calls)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(_texts(content)).encode()).hexdigest()[:16]


def _texts(content: object) -> list[str]:
    """All strings below `content`, in order, but marks of caching and billing."""
    if isinstance(content, str):
        return [] if content.startswith(BILLING) else [content]
    if isinstance(content, dict):
        kept = {
            key: value for key, value in content.items() if key not in ("cache_control", "type")
        }
        return [text for value in kept.values() for text in _texts(value)]
    if isinstance(content, list):
        return [text for value in content for text in _texts(value)]
    return []
