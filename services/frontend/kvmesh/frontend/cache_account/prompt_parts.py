"""The part of a request that contains a token of its rendered prompt. Pure.

Templates copy texts in order, so each part is searched after the one before it. The search scans a
bounded multiple of the prompt's length, whatever the number of parts.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator

from kvmesh.bus.messages import PromptChange
from kvmesh.frontend.conversation import (
    Block,
    GenerateRequest,
    Message,
    Text,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.tokenizer.prefix_cache import EncodedPrompt
from kvmesh.hashing import TOKEN_BYTES

PROBE = 64  # characters to search for
BUDGET = 8  # times the prompt's length
MAX_NAME = 128  # characters of a tool's name, as long as those that providers accept


def locate(
    request: GenerateRequest,
    encoded: EncodedPrompt | None,
    decode: Callable[[bytes], str],
    token: int,
) -> PromptChange:
    """The part that contains the token, as a change whose `way` and `turns` are not known."""
    if encoded is None or not encoded.tokens:
        return PromptChange(token=token, part="prompt", way="")
    offset = char_offset(encoded, decode, token)
    best = PromptChange(token=token, part="prompt", way="", offset=offset)
    for start, part, index, name in _Parts(encoded.text).of(request):
        if start <= offset and (best.part == "prompt" or offset - start < best.offset):
            best = PromptChange(
                token=token, part=part, way="", index=index, name=name, offset=offset - start
            )
    return best


def char_offset(encoded: EncodedPrompt, decode: Callable[[bytes], str], token: int) -> int:
    """The offset in the text of the character at which a token begins.

    `decode` may leave out special tokens, with which segments begin.
    """
    at = token * TOKEN_BYTES
    segment = min(bisect_right(encoded.sizes, at), len(encoded.sizes)) - 1
    edge, before = encoded.edges[segment], decode(encoded.tokens[encoded.sizes[segment] : at])
    start = encoded.text.find(before[:PROBE], edge, edge + 2 * PROBE)
    return max(start, edge) + len(before)


class _Parts:
    """Starts of a request's parts in a text, until the budget for scanning is used up."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._budget = BUDGET * len(text)

    def of(self, request: GenerateRequest) -> Iterator[tuple[int, str, int | None, str | None]]:
        """Yield (start, part, index, name) of the parts that are found."""
        at = 0
        for index, tool in enumerate(request.tools):
            start = self._find(f'"{tool.name}"', at)
            if start >= 0:
                at = start
                yield start, "tool", index, tool.name[:MAX_NAME]
        at = systems = 0
        for number, message in enumerate(request.messages):
            start = self._find(_opening(message), at)
            is_system = message.role == "system"
            if start >= 0:
                at = start + 1
                index = systems if is_system else number - systems
                yield start, "system" if is_system else "message", index, message.role
            systems += is_system

    def _find(self, text: str, at: int) -> int:
        if not text or self._budget <= 0:
            return -1
        start = self._text.find(text, at)
        self._budget -= (start if start >= 0 else len(self._text)) - at + 1
        return start


def _opening(message: Message) -> str:
    """The first characters of a message that its template copies; empty if there are none."""
    for block in message.blocks:
        if text := _text(block).strip():
            return text[:PROBE]
    return ""


def _text(block: Block) -> str:
    if isinstance(block, Text):
        return block.text
    if isinstance(block, ToolCall):
        return block.name
    if isinstance(block, ToolResult):
        return next((part.text for part in block.content if isinstance(part, Text)), "")
    return ""
