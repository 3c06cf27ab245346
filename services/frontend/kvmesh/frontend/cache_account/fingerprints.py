"""Fingerprints of a prompt's parts, by which two prompts are compared without their texts. Pure.

A text may occur in several parts, and templates escape texts or move them; so the part that differs
from the earlier prompt is found by hashes of the request's parts, not by a search of the prompt.
"""

from array import array
from collections.abc import Iterator
from itertools import chain
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kvmesh._native import xxh3
from kvmesh.bus.messages import PromptParts
from kvmesh.frontend.conversation import (
    GAP,
    Block,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolNotice,
    ToolResult,
)
from kvmesh.frontend.dialects.templates.chat_messages import without_billing
from kvmesh.frontend.dialects.tools import model_name

ROLES = ("system", "user", "assistant", "tool")
MAX_NAME = 128  # characters of a tool's name, as long as those that providers accept
_ROLE_BITS = 3
_MASK = (1 << 32) - 1

Hashes: TypeAlias = NDArray[np.uint32] | NDArray[np.uint64]
Way: TypeAlias = Literal["changed", "inserted", "removed"]


class PartDifference(Struct, frozen=True):
    """A part that differs. `number` is its index among all tools, or among all messages.

    That is the index in the later prompt, unless the part is removed.
    """

    part: Literal["system", "tool", "message", "thinking"]
    way: Way
    number: int
    index: int
    name: str


def fingerprints(request: GenerateRequest) -> PromptParts | None:
    """The parts of a conversation; None of a raw prompt."""
    if not request.messages:
        return None
    tools = visible_tools(request)
    hashes = list(chain.from_iterable(map(_message, request.messages)))
    return PromptParts(
        tools=[model_name(tool.name, tool.namespace)[:MAX_NAME] for tool in tools],
        tool_hashes=array("I", map(_tool, tools)).tobytes(),
        messages=array("I", hashes).tobytes(),
    )


def continued(request: GenerateRequest, earlier: PromptParts) -> PromptParts | None:
    """The parts of a request whose prompt begins with an earlier one; None if they must be found.

    Only the messages behind those of the earlier prompt are hashed.
    """
    count, messages = messages_of(earlier), request.messages
    if not 0 < count <= len(messages):
        return None
    last = array("I", _message(messages[count - 1])).tobytes()
    if last != earlier.messages[-len(last) :]:
        return None  # messages are cut in another way
    hashes = list(chain.from_iterable(map(_message, messages[count:])))
    more = array("I", hashes).tobytes()
    return PromptParts(
        tools=earlier.tools, tool_hashes=earlier.tool_hashes, messages=earlier.messages + more
    )


def visible_tools(request: GenerateRequest) -> list[Tool]:
    """The tools that the prompt shows in their own section."""
    return [tool for tool in request.tools if not tool.deferred]


def tool_difference(after: PromptParts, before: PromptParts) -> PartDifference | None:
    """The first tool that differs from the earlier prompt's."""
    new, old = np.frombuffer(after.tool_hashes, "<u4"), np.frombuffer(before.tool_hashes, "<u4")
    at = _common(new, old)
    if at == len(new) == len(old):
        return None
    way = _way(new[at:], old[at:])
    if not len(new[at:]) or (way == "changed" and not _common(new[at + 1 :], old[at + 1 :])):
        # nothing that follows tells: both lists end at the difference
        way = _by_length(len(new) - len(old), way)
    names = before.tools if way == "removed" else after.tools
    return PartDifference("tool", way, at, at, names[at] if at < len(names) else "")


def message_differences(after: PromptParts, before: PromptParts) -> Iterator[PartDifference]:
    """The messages that differ from the earlier prompt's, in order; messages may follow those."""
    new, old = np.frombuffer(after.messages, "<u8"), np.frombuffer(before.messages, "<u8")
    at = _common(new, old)
    if at == len(old):
        return
    way = "removed" if at == len(new) else _way(new[at:], old[at:])
    last = at == len(old) - 1
    if last and way == "changed" and (new[at] ^ old[at]) & _ROLE_BITS:
        way = "removed"  # and another message follows in its place
    if way != "changed":
        yield _message_difference(way, old if way == "removed" else new, at)
        return
    end = min(len(new), len(old))
    for number in (at + np.flatnonzero(new[at:end] != old[at:end])).tolist():
        changed = _message_difference("changed", new, number)
        bits = int(new[number] ^ old[number])
        if bits & _MASK:
            yield changed
        else:
            thinking: Way = "changed"
            if not int(new[number]) >> 32:
                thinking = "removed"
            elif not int(old[number]) >> 32:
                thinking = "inserted"
            yield replace(changed, part="thinking", way=thinking)


def messages_of(parts: PromptParts) -> int:
    """The number of messages."""
    return len(parts.messages) // 8


def has_turns(parts: PromptParts) -> bool:
    """True if the prompt has an answer, so that it continues an earlier one."""
    roles = np.frombuffer(parts.messages, "<u4")[::2] & _ROLE_BITS
    return bool((roles == ROLES.index("assistant")).any())


def likeness(after: PromptParts, before: PromptParts) -> float:
    """The share of the earlier prompt's messages that a later one has at the same index.

    0 if one of them has tools and the other none, or most tools differ: another agent sent it.
    """
    if bool(after.tools) != bool(before.tools):
        return 0.0
    tools = _unpacked(before.tool_hashes)
    if 2 * len(_unpacked(after.tool_hashes) & tools) < len(tools):
        return 0.0
    new, old = np.frombuffer(after.messages, "<u8"), np.frombuffer(before.messages, "<u8")
    count = min(len(new), len(old))
    return int((new[:count] == old[:count]).sum()) / max(len(old), 1)


def _unpacked(hashes: bytes) -> set[int]:
    return set(memoryview(hashes).cast("I"))


def _common(one: Hashes, other: Hashes) -> int:
    """The number of leading elements that two arrays share."""
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    return int(differs.argmax()) if differs.any() else count


def _way(new: Hashes, old: Hashes) -> Way:
    """The way in which the first of `old` became `new`: the one after which most is equal."""
    changed = _common(new[1:], old[1:])
    inserted, removed = _common(new[1:], old), _common(new, old[1:])
    if changed >= max(inserted, removed):
        return "changed"
    return "inserted" if inserted >= removed else "removed"


def _by_length(more: int, way: Way) -> Way:
    if more == 0:
        return way
    return "inserted" if more > 0 else "removed"


def _message_difference(way: Way, messages: Hashes, number: int) -> PartDifference:
    roles = messages[: number + 1] & _ROLE_BITS
    role, systems = int(roles[number]), int((roles[:number] == 0).sum())
    if role == 0:
        return PartDifference("system", way, number, systems, ROLES[0])
    return PartDifference("message", way, number, number - systems, ROLES[role])


def _tool(tool: Tool) -> int:
    name = model_name(tool.name, tool.namespace)
    form = f"{tool.custom}\0{tool.regex}\0{tool.grammar}"
    text = f"{name}\0{tool.description}\0{form}\0".encode("utf-8", "surrogatepass")
    return xxh3(text + _json(tool.parameters)) & _MASK


def _json(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError, TypeError):
        return b""  # such a schema is not compared


def _message(message: Message) -> tuple[int, int]:
    """The hash of a message without its thinking, and that of its thinking."""
    role = ROLES.index(message.role)
    blocks = without_billing(message) if role == 0 else message.blocks
    if len(blocks) == 1 and type(blocks[0]) is Text:
        return _hash(blocks[0].text) & ~_ROLE_BITS | role, 0
    shown, thinking = [], []
    for block in blocks:
        if type(block) is Thinking:
            thinking.append(block.text)
        else:
            shown.append(_text(block))
    thought = _hash(GAP.join(thinking)) or 1 if any(thinking) else 0
    return _hash(GAP.join(shown)) & ~_ROLE_BITS | role, thought


def _text(block: Block) -> str:
    if isinstance(block, Text):
        return block.text
    if isinstance(block, ToolResult):
        texts = (part.text if isinstance(part, Text) else "\0image" for part in block.content)
        failed = ("\0error",) if block.is_error else ()
        return GAP.join(chain(failed, texts, block.references))
    if isinstance(block, ToolCall):
        return f"\0{model_name(block.name, block.namespace)}\0{block.arguments}"
    return f"\0{block.name}\0{block.removed}" if isinstance(block, ToolNotice) else "\0image"


def _hash(text: str) -> int:
    return xxh3(text.encode("utf-8", "surrogatepass")) & _MASK
