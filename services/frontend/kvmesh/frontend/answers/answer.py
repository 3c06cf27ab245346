"""A generated answer, and the names by which later requests refer to it. Pure.

An answer with tool calls is named by the id of its first call, which clients return. Other answers
are named by their text and their place in the conversation.
"""

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from msgspec import Struct

from kvmesh.frontend.conversation import (
    Block,
    Generated,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)

_OWN_ID = re.compile(r"call_[0-9a-f]{24}")  # as `dialects.output.call_id` makes them
OVERHEAD = 600  # bytes of an answer's objects in memory


class Answer(Struct, frozen=True, omit_defaults=True):
    """An answer of the model whose files have the digest `files`.

    `blocks` are in the order of generation. `forced`: `tool_choice` made the engine write calls in
    another syntax than the model's own.
    """

    files: str
    blocks: list[Block]
    generated: Generated
    forced: bool = False

    @property
    def size(self) -> int:
        """About the bytes that it takes in memory."""
        return OVERHEAD + 2 * len(self.generated.text) + len(self.generated.tokens)


class AnswerRun(Struct, frozen=True):
    """Assistant messages `first` to `end` (exclusive), which are one answer, and its name."""

    first: int
    end: int
    blocks: list[Block]
    name: str


def answer_runs(messages: Sequence[Message]) -> Iterator[AnswerRun]:
    """The answers of a conversation that may be stored, oldest first.

    The last message is no answer: a model may have to continue it.
    """
    index, number = 0, 0
    while index < len(messages):
        if messages[index].role != "assistant":
            index += 1
            continue
        first = index
        while index < len(messages) and messages[index].role == "assistant":
            index += 1
        if index == len(messages):
            return
        blocks = [block for message in messages[first:index] for block in message.blocks]
        if name := answer_name(messages[:first], blocks, number):
            yield AnswerRun(first, index, blocks, name)
        number += 1


def answer_name(before: Sequence[Message], blocks: Sequence[Block], number: int) -> str:
    """The name of the answer `blocks` after the messages `before`, `number` answers among them.

    "" if no frontend can have generated it.
    """
    call = next((block for block in blocks if isinstance(block, ToolCall)), None)
    if call is not None:
        return call.id if _OWN_ID.fullmatch(call.id) else ""
    text = "".join(block.text for block in blocks if isinstance(block, Text)).strip()
    if not text or not before:
        return ""
    parts = (str(number), _words(before[0]), _words(before[-1]), text)
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(b"%d:" % len(part) + part.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def worth_storing(blocks: Sequence[Block]) -> bool:
    """True if a client may return an answer other than it was generated: calls and thinking."""
    return any(isinstance(block, ToolCall | Thinking) for block in blocks)


def answers_before(messages: Sequence[Message]) -> int:
    """The number of answers in a conversation."""
    roles = [message.role for message in messages]
    return sum(
        role == "assistant" and (index == 0 or roles[index - 1] != "assistant")
        for index, role in enumerate(roles)
    )


def _words(message: Message) -> str:
    """The last text of a message."""
    for block in reversed(message.blocks):
        if isinstance(block, Text):
            return block.text
        if isinstance(block, ToolResult):
            return "".join(part.text for part in block.content if isinstance(part, Text))
    return ""
