"""Keeps control tokens that are written in a conversation's texts apart from the template's. Pure.

A tokenizer turns the text of a control token into that token wherever it stands, so a file or a web
page that an agent reads could end a message and begin another. Here each such text in a message or
a tool is broken by a guard before the template is rendered. The guard leaves the prompt's text
afterwards; its place is a cut, on whose sides the text is encoded apart.
"""

import re
import secrets
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, TypeAlias

from msgspec.structs import replace

from kvmesh.frontend.conversation import (
    Block,
    Image,
    Insertion,
    Message,
    RenderedPrompt,
    Text,
    Thinking,
    ToolCall,
    ToolNotice,
    ToolResult,
)
from kvmesh.frontend.dialects.templates.prompt_json import dumps
from kvmesh.frontend.dialects.tools import arguments
from kvmesh.frontend.turn_memo import NO_MEMO, TurnMemo

# A client cannot write a guard that it cannot guess. Letters and digits pass every filter alike.
GUARD = f"kvm{secrets.token_hex(8)}g"
SLICE = 1 << 16  # characters per call of `re`, which holds the GIL
LONGEST = 256  # characters of a control token
Pattern: TypeAlias = re.Pattern[str]
_ESCAPES = ("\\u", "\\/")  # of JSON, which may hide a control token


class ControlTokens:
    """The texts of a model's control tokens, as patterns.

    `special`: tokens that no text of a conversation may become. `every`: these, and other tokens
    with which the template marks a conversation's parts, such as `<think>`; an assistant's text may
    contain the others, since templates read thinking there. Where the tokenizer's tokens depend on
    a text's start, `joins` is False, and a space breaks the text instead of a cut.
    """

    def __init__(
        self, special: Pattern | None = None, every: Pattern | None = None, joins: bool = True
    ) -> None:
        self._special = special
        self._all = every
        self._joins = joins

    def guard(self, messages: list[Message]) -> list[Message]:
        """The messages with guards; the same ones where there are none."""
        if self._all is None:
            return messages
        return [m if self._is_clean(m) else self._message(m) for m in messages]

    def absent_from(self, messages: list[Message], memo: TurnMemo = NO_MEMO) -> bool:
        """True if `guard` is known to return the same messages."""
        if self._all is None:
            return True
        return memo.first(self, messages, lambda m: not self._is_clean(m)) == len(messages)

    def guard_json(self, value: Any) -> Any:
        """A JSON value with guards in its strings and names; the same one if there are none."""
        if isinstance(value, str):
            return self._text(value, self._all)
        if isinstance(value, dict):
            items = {self.guard_json(k): self.guard_json(v) for k, v in value.items()}
            return value if items == value else items
        if isinstance(value, list):
            entries = [self.guard_json(entry) for entry in value]
            return value if entries == value else entries
        return value

    def reveal(self, prompt: RenderedPrompt) -> RenderedPrompt:
        """The prompt without guards, and with cuts in their places."""
        if GUARD not in prompt.text:
            return prompt
        parts = prompt.text.split(GUARD)
        before = [*accumulate(map(len, parts[:-1]))]  # the characters before each guard
        guards = [size + number * len(GUARD) for number, size in enumerate(before)]
        shift = len(GUARD) if self._joins else len(GUARD) - 1

        def moved(insertion: Insertion) -> Insertion:
            by = shift * bisect_left(guards, insertion.start)
            return Insertion(insertion.start - by, insertion.end - by, insertion.tokens)

        text = ("" if self._joins else " ").join(parts)
        cuts = before if self._joins else []
        return RenderedPrompt(text, [*map(moved, prompt.insertions)], cuts)

    def _is_clean(self, message: Message) -> bool:
        """True for a message of the usual kinds of blocks without control tokens."""
        answers = message.role == "assistant"
        shown = self._special if answers else self._all
        blocks, texts = message.blocks, 0
        if len(blocks) == 1 and type(blocks[0]) is Text:
            return not _occurs(shown, blocks[0].text)
        for block in blocks:
            kind = type(block)
            if kind is Text:
                texts += answers  # a control token may begin in one text and end in the next
                found = _occurs(shown, block.text)  # type: ignore[union-attr]
            elif kind is Thinking:
                found = _occurs(self._all, block.text)  # type: ignore[union-attr]
            elif kind is ToolCall:
                found = self._occurs_in_call(block)  # type: ignore[arg-type]
            elif kind is ToolResult:
                found = self._occurs_in_result(block)  # type: ignore[arg-type]
            else:
                return False
            if found or texts > 1:
                return False
        return True

    def _occurs_in_call(self, call: ToolCall) -> bool:
        written = call.arguments
        if call.custom or call.namespace or _ESCAPES[0] in written or _ESCAPES[1] in written:
            return True
        return _occurs(self._all, call.name) or _occurs(self._all, call.arguments)

    def _occurs_in_result(self, result: ToolResult) -> bool:
        if result.references:
            return True
        for part in result.content:
            if type(part) is not Text or _occurs(self._all, part.text):
                return True
        return False

    def _message(self, message: Message) -> Message:
        answers = message.role == "assistant"
        blocks = [self._block(block, answers) for block in message.blocks]
        if len(blocks) > 1 and (
            [*map(type, blocks)].count(Text) > 1 if answers else Image in map(type, blocks)
        ):
            self._part(blocks, self._special if answers else self._all)
        if blocks == message.blocks:
            return message
        return Message(message.role, blocks, message.generated)

    def _block(self, block: Block, answers: bool) -> Block:
        kind = type(block)
        if kind is Text or kind is Thinking:
            pattern = self._special if answers and kind is Text else self._all
            text = self._text(block.text, pattern)  # type: ignore[union-attr]
            return block if text is block.text else replace(block, text=text)  # type: ignore[union-attr]
        if isinstance(block, ToolResult):
            return self._result(block)
        if isinstance(block, ToolNotice):
            name = self._text(block.name, self._all)
            return block if name is block.name else replace(block, name=name)
        return self._call(block) if isinstance(block, ToolCall) else block

    def _part(self, blocks: list[Block], pattern: Pattern | None) -> None:
        """Guard control tokens whose text begins in one block and ends in another.

        Templates write the texts of a message without a gap.
        """
        before = ""
        for index, block in enumerate(blocks):
            if type(block) is not Text:
                before = before if type(block) is Image else ""
                continue
            text = block.text
            if before and pattern is not None and pattern.search(before + text[:LONGEST]):
                text = GUARD + text
                blocks[index] = replace(block, text=text)
            before = (before + text)[-LONGEST:]

    def _result(self, result: ToolResult) -> ToolResult:
        content: list[Any] = [self._block(part, False) for part in result.content]
        if len(content) > 1 and Image in map(type, content):
            self._part(content, self._all)
        names = [self._text(name, self._all) for name in result.references]
        if content == result.content and names == result.references:
            return result
        return replace(result, content=content, references=names)

    def _call(self, call: ToolCall) -> ToolCall:
        name, written = self._text(call.name, self._all), call.arguments
        space = call.namespace and self._text(call.namespace, self._all)
        if call.custom:
            written = self._text(written, self._all)
        elif any(e in written for e in _ESCAPES) or self._text(written, self._all) is not written:
            value = arguments(call)
            guarded = self.guard_json(value)
            written = written if guarded is value else dumps(guarded)
        if name is call.name and written is call.arguments and space is call.namespace:
            return call
        return replace(call, name=name, arguments=written, namespace=space)

    def _text(self, text: str, pattern: Pattern | None) -> str:
        if pattern is None or (len(text) <= SLICE and pattern.search(text) is None):
            return text
        cuts = [start + 1 for start in _starts(text, pattern)]
        if not cuts:
            return text
        return GUARD.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))


NO_CONTROL = ControlTokens()


def _occurs(pattern: Pattern | None, text: str) -> bool:
    """True if a control token may be in the text, which is for sure if it is short."""
    return pattern is not None and (len(text) > SLICE or pattern.search(text) is not None)


def _starts(text: str, pattern: Pattern) -> Iterator[int]:
    """The offsets at which control tokens start; they may overlap."""
    pos = 0
    while pos < len(text):
        match = pattern.search(text, pos, pos + SLICE + LONGEST)
        if match is not None:
            yield match.start()
        pos = match.start() + 1 if match is not None else pos + SLICE
