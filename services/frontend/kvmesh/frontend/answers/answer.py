"""A generated answer, and the names by which later requests refer to it. Pure.

An answer with tool calls is named by the id of its first call, which clients return. Other answers
are named by their text and their place in the conversation.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b

from msgspec import Struct

from kvmesh._native import xxh3
from kvmesh.frontend.conversation import (
    GAP,
    Block,
    Generated,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.turn_memo import NO_MEMO, TurnMemo
from kvmesh.runtime.lru import LruCache

_OWN_ID = re.compile(r"call_[0-9a-f]{24}")  # as `dialects.output.call_id` makes them
OVERHEAD = 950  # bytes of the objects of one answer in memory
MAX_NAMES = 1 << 14  # of 300 bytes each


class Answer(Struct, frozen=True, omit_defaults=True):
    """An answer of the model whose files have the digest `files`.

    `blocks` are in the order of generation; `generated` is None if they are not all of it.
    `forced`: `tool_choice` made the engine write calls in another syntax than the model's own.
    """

    files: str
    blocks: list[Block]
    generated: Generated | None
    forced: bool = False

    @property
    def size(self) -> int:
        """About the bytes that it takes in memory."""
        texts = sum(map(_length, self.blocks))
        made = self.generated
        return OVERHEAD + texts + (len(made.text) + len(made.tokens) if made is not None else 0)


class AnswerRun(Struct, frozen=True):
    """Assistant messages `first` to `end` (exclusive), which are one answer, its name and place."""

    first: int
    end: int
    blocks: list[Block]
    name: str
    place: int


class AnswerNames:
    """Names of answers by hashes of what they are made of, since each turn repeats those before.

    A name that equal hashes make wrong is that of another answer, with which the client's is
    compared before it is shown. The place of an answer is a hash of the prompt that it answers: of
    the tenant, the number of earlier answers, and the first and the last message.
    """

    def __init__(self) -> None:
        self._known: LruCache[int, str] = LruCache(MAX_NAMES)
        self._first: Message | None = None
        self._first_hash = 0

    def place(self, tenant: str, messages: Sequence[Message], before: int, number: int) -> int:
        """The place of the answer after the first `before` messages with `number` answers."""
        if not before:
            return 0
        if messages[0] is not self._first:  # all answers share it, and it may be long
            self._first, self._first_hash = messages[0], _hash(_words(messages[0]))
        return hash((tenant, number, self._first_hash, _hash(_words(messages[before - 1]))))

    def of(
        self,
        place: int,
        messages: Sequence[Message],
        before: int,
        blocks: Sequence[Block],
        number: int,
    ) -> str:
        """The name, as `answer_name` makes it."""
        if ToolCall in map(type, blocks) or not before:
            return answer_name(messages, before, blocks, number)
        key = hash((place, _hash(_written(blocks))))
        name = self._known.get(key)
        if name is None:
            name = answer_name(messages, before, blocks, number)
            self._known.put(key, name)
        return name


def answer_runs(
    messages: Sequence[Message], names: AnswerNames, tenant: str, memo: TurnMemo = NO_MEMO
) -> list[AnswerRun]:
    """The answers of a conversation that may be stored, oldest first.

    The last message is no answer: a model may have to continue it.
    """
    step = "answers", tenant
    same, known = memo.recall(step, messages)
    runs: list[AnswerRun] = [run for run in known or () if run.end < same]  # whose end is known
    end = runs[-1].end if runs else 0
    for first in range(end, len(messages)):
        if first < end or messages[first].role != "assistant":
            continue
        blocks, end = messages[first].blocks, first + 1
        while end < len(messages) and messages[end].role == "assistant":
            blocks = [*blocks, *messages[end].blocks]
            end += 1
        if end == len(messages):
            break
        place = names.place(tenant, messages, first, len(runs))
        name = names.of(place, messages, first, blocks, len(runs))
        runs.append(AnswerRun(first, end, blocks, name, place))
    memo.note(step, messages, runs)
    return [run for run in runs if run.name]


def answer_name(
    messages: Sequence[Message], before: int, blocks: Sequence[Block], number: int
) -> str:
    """The name of the answer `blocks` after the first `before` messages with `number` answers.

    "" if no frontend can have generated it.
    """
    for block in blocks:
        if type(block) is ToolCall:
            return block.id if _OWN_ID.fullmatch(block.id) else ""
    text = _written(blocks).replace(GAP, "").strip()  # clients join texts with gaps, or without
    if not text or not before:
        return ""
    parts = (str(number), _words(messages[0]), _words(messages[before - 1]), text)
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(b"%d:" % len(part) + part.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def is_call(name: str) -> bool:
    """True if an answer of this name has tool calls: then it is stored wherever it is generated."""
    return name.startswith("call_")


def name_after(messages: Sequence[Message], blocks: Sequence[Block]) -> str:
    """The name of the answer to a conversation."""
    return answer_name(messages, len(messages), blocks, answers_in(messages))


def answers_in(messages: Sequence[Message]) -> int:
    """The number of answers in a conversation."""
    roles = [message.role for message in messages]
    pairs = zip(roles, ["user", *roles], strict=False)
    return sum(role == "assistant" != before for role, before in pairs)


def _length(block: Block) -> int:
    if isinstance(block, ToolCall):
        return len(block.name) + len(block.arguments)
    return len(block.text) if isinstance(block, Text | Thinking) else 0


def _hash(text: str) -> int:
    return xxh3(text.encode("utf-8", "surrogatepass"))


def _written(blocks: Sequence[Block]) -> str:
    if len(blocks) == 1 and type(blocks[0]) is Text:
        return blocks[0].text
    return "".join(block.text for block in blocks if isinstance(block, Text))


def _words(message: Message) -> str:
    """The last text of a message."""
    for block in reversed(message.blocks):
        if isinstance(block, Text):
            return block.text
        if isinstance(block, ToolResult):
            return "".join(part.text for part in block.content if isinstance(part, Text))
    return ""
