"""The position of a request's parts in its rendered prompt. Pure.

Templates copy texts in order, so each part is searched after the one before it, at most as far as
the parts since then are long: one that the template hides or escapes costs little, and those after
it are found still.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import islice

from kvmesh.bus.messages import PromptChange
from kvmesh.frontend.cache_account.fingerprints import MAX_NAME, visible_tools
from kvmesh.frontend.conversation import (
    Block,
    GenerateRequest,
    Message,
    Text,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.dialects.tools import model_name
from kvmesh.frontend.tokenizer.prefix_cache import EncodedPrompt
from kvmesh.hashing import TOKEN_BYTES

PROBE = 64  # characters to search for
SLACK = 2048  # characters that a template may add around a part
BUDGET = 8  # times the prompt's length
MAX_TRIES = 16  # places of one text


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
    search = _Search(encoded.text, offset)
    for parts in (_tools(request), _messages(request)):
        for start, (part, index, name) in search.starts(parts):
            if best.part == "prompt" or offset - start < best.offset:
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


def start_of_tool(name: str, text: str, offset: int) -> int:
    """The start of the tool whose definition contains the offset; -1 if it is not found."""
    quoted = f'"{name}"'
    return text.rfind(quoted, 0, offset + len(quoted))


def start_of_message(message: Message, text: str, offset: int) -> int:
    """The start of the message that contains the offset; -1 if the template escapes it."""
    content = next(_texts(message), "")
    opening, first = content[:PROBE], max(offset - len(content) - PROBE, 0)
    start = text.find(opening, first, offset + len(opening)) if opening else -1
    for _ in range(MAX_TRIES):
        if start < 0 or text[start:offset] == content[: max(offset - start, 0)]:
            break
        start = text.find(opening, start + 1, offset + len(opening))
    return start


def has_near(text: str, wanted: str, offset: int) -> bool:
    """True if the opening of `wanted` is in the text about the offset."""
    opening = wanted.strip()[:PROBE]
    return text.find(opening, max(offset - SLACK, 0), offset + len(opening) + SLACK) >= 0


_Part = tuple[str, int | None, str | None]
_Sought = tuple[str, int, _Part]  # its opening, about how many characters it has, the part


class _Search:
    """Starts of parts up to `end` in a text, until the budget for scanning is used up."""

    def __init__(self, text: str, end: int) -> None:
        self._text = text
        self._end = end
        self._budget = BUDGET * len(text)

    def starts(self, parts: Iterator[_Sought]) -> Iterator[tuple[int, _Part]]:
        """Yield the start of each part that is found; none after the end."""
        at, reach = 0, len(self._text)
        for opening, length, part in parts:
            if self._budget <= 0:
                return
            limit = min(at + reach + len(opening), len(self._text))
            start = self._text.find(opening, at, limit) if opening else -1
            self._budget -= (start if start >= 0 else limit) - at + SLACK // PROBE
            if start > self._end:
                return
            if start >= 0:
                yield start, part
                at, reach = start + _least(length, len(opening)), SLACK
            reach = min(reach + 2 * length, len(self._text))


def _least(length: int, opening: int) -> int:
    """The characters that a part has at least in its prompt, which may write it more briefly."""
    return max(opening, length // 2)


def _tools(request: GenerateRequest) -> Iterator[_Sought]:
    for index, tool in enumerate(visible_tools(request)):
        name = model_name(tool.name, tool.namespace)
        yield f'"{name}"', len(tool.description), ("tool", index, name[:MAX_NAME])


def _messages(request: GenerateRequest) -> Iterator[_Sought]:
    systems = 0
    for number, message in enumerate(request.messages):
        is_system = message.role == "system"
        texts = list(islice(_texts(message), MAX_TRIES))
        opening = texts[0][:PROBE] if texts else ""
        length = sum(map(len, texts))
        if is_system:
            yield opening, length, ("system", systems, message.role)
        else:
            yield opening, length, ("message", number - systems, message.role)
        systems += is_system


def _texts(message: Message) -> Iterator[str]:
    """The texts of a message that its template copies."""
    for block in message.blocks:
        for text in _copied(block):
            if text := text.strip():
                yield text


def _copied(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        yield block.text
    elif isinstance(block, ToolCall):
        yield model_name(block.name, block.namespace)
        yield block.arguments
    elif isinstance(block, ToolResult):
        yield from (part.text for part in block.content if isinstance(part, Text))
