"""Where the blocks of a conversation stand in its rendered prompt. Pure.

Templates write texts as they are and in their order. Long texts are looked for from the end of
the prompt backwards, each before the one after it; short ones between their long neighbours, the
first match being the earliest place that they can have. Only the newest turns and what is marked
are looked for: blocks of older ones got their kinds when they were new. Texts that are not there
cost a few looks through the prompt, and no more however many they are. What a template hides
ends with what stands before it, or with the prompt if nothing follows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from msgspec import Struct

from kvmesh.frontend.conversation import (
    Block,
    CacheControl,
    GenerateRequest,
    Image,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.dialects.templates.chat_messages import BILLING, GAP

PART = 64  # characters that find a text; the rest is compared
LONG = 64  # shorter texts hold no block of their own
SLACK = 64  # characters that a template puts around a text
RECENT = 2  # answers
REACH = 1 << 17  # characters between neighbours
MAX_MISSES = 8
_MARKABLE: frozenset[type] = frozenset((Text, ToolResult, ToolCall, Image))
_RESULTS: frozenset[type] = frozenset((ToolResult,))


class PromptSpan(Struct, frozen=True):
    """Characters `start` to `end`, and what they are."""

    start: int
    end: int
    kind: str


class PromptSpans(Struct):
    """In characters: the end of the system prompt and tools, spans of other kinds in order, and

    marks, as the end of what they keep and for how many seconds. The head and tool results are
    whole segments; the rest lies at an edge if only the template's own text is in between.
    """

    head: int = 0
    spans: list[PromptSpan] = []
    marks: list[tuple[int, float]] = []


class _Anchor(Struct):
    """A text to be found; it `closes` its message, or even all. `start` is -1 until found.

    No text stands for a marked block that a template writes in its own way.
    """

    text: str
    kind: str
    closes: bool
    last: bool
    cache: CacheControl | None
    start: int = -1


def locate_spans(
    request: GenerateRequest, text: str, edges: Sequence[int], drops_thinking: bool
) -> PromptSpans:
    """The places in the rendered `text` of `request`; `edges` are those of its segments.

    Thinking counts as such only if the template drops it from later prompts.
    """
    messages = request.messages
    lead = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    marked = _marked(messages, lead)
    first = max(lead, min(marked, _recent(messages)))
    wanted = _MARKABLE if marked < len(messages) else _RESULTS
    search = _Search(text, edges)
    head = list(_anchors(messages[:lead], _MARKABLE))
    begin = next(_anchors(messages[lead:], _MARKABLE), None)
    shown = any(not tool.deferred for tool in request.tools)
    ttls = [tool.cache.ttl_s for tool in request.tools if tool.cache is not None]
    search.head(head, begin, shown, max(ttls, default=0.0))
    if drops_thinking:
        wanted |= {Thinking}
    search.turns(list(_anchors(messages[first:], wanted)))
    return search.found


def _marked(messages: list[Message], lead: int) -> int:
    """The first message with a mark, from number `lead` on."""
    for place in range(lead, len(messages)):
        for block in messages[place].blocks:
            if type(block) in _MARKABLE and block.cache is not None:  # type: ignore[union-attr]
                return place
    return len(messages)


def _recent(messages: list[Message]) -> int:
    """Where the newest answers begin."""
    answers = 0
    for place in range(len(messages) - 1, -1, -1):
        answers += messages[place].role == "assistant"
        if answers == RECENT:
            return place
    return 0


def _anchors(messages: list[Message], wanted: frozenset[type]) -> Iterator[_Anchor]:
    for message in messages:
        for block in message.blocks:
            if type(block) not in wanted:
                continue
            text, kind = _text(block)
            cache: CacheControl | None = getattr(block, "cache", None)
            if (text and not text.startswith(BILLING)) or cache is not None:
                closes = block is message.blocks[-1]
                yield _Anchor(text, kind, closes, closes and message is messages[-1], cache)


def _text(block: Block) -> tuple[str, str]:
    """No text for blocks that templates write in their own way."""
    if isinstance(block, Text):
        return block.text.strip(), "conversation"
    if isinstance(block, ToolResult):
        return GAP.join(b.text for b in block.content if isinstance(b, Text)).strip(), "tool"
    if isinstance(block, Thinking):
        return block.text.strip(), "thinking"
    return "", "other"


class _Search:
    """Looks for anchors in one text."""

    def __init__(self, text: str, edges: Sequence[int]) -> None:
        self._text = text
        self._edges = edges
        self._at = 0
        self._room = MAX_MISSES * len(text)
        self.found = PromptSpans()

    def head(
        self, anchors: list[_Anchor], begin: _Anchor | None, tools: bool, tools_ttl: float
    ) -> None:
        """The system prompt, up to the segment of the first turn; tools are anywhere in it."""
        marks: list[tuple[int, float]] = []
        for anchor in anchors:
            self._forward(anchor, len(self._text))
            if anchor.cache is not None:
                marks.append((self._at, anchor.cache.ttl_s))
        if begin is not None and (start := self._first(begin.text, tools)) >= 0:
            self.found.head = self._before(start)
        for end, ttl in marks:
            place = max(self.found.head, end) if end == self._at else end
            self.found.marks.append((place, ttl))
        if tools_ttl:
            self.found.marks.append((self.found.head, tools_ttl))

    def turns(self, anchors: list[_Anchor]) -> None:
        limits = self._backward(anchors)
        self._at = max(self._at, self.found.head)
        ends = [self._forward(*found) for found in zip(anchors, limits, strict=True)]
        followings = [*(anchor.start for anchor in anchors[1:]), len(self._text)]
        for anchor, end, following in zip(anchors, ends, followings, strict=False):
            if anchor.cache is not None:
                hidden = anchor.start < 0 or not anchor.text
                whole = hidden and anchor.last
                place = len(self._text) if whole else self._end(anchor, end, following)
                self.found.marks.append((place, anchor.cache.ttl_s))
            if anchor.start < 0 or not anchor.text:
                continue
            if anchor.kind == "tool":
                self._span(*self._segments(anchor.start, end), "tool")
            elif anchor.kind == "thinking":
                self._span(anchor.start, end, "thinking")

    def _backward(self, anchors: list[_Anchor]) -> list[int]:
        """Find long texts; where each anchor must end at the latest."""
        limits = []
        limit, misses = len(self._text), 0
        for anchor in reversed(anchors):
            limits.append(limit)
            if len(anchor.text) >= LONG and misses < MAX_MISSES:
                anchor.start = self._last(anchor.text, limit)
                limit = anchor.start if anchor.start >= 0 else limit
                misses += anchor.start < 0
        return limits[::-1]

    def _last(self, text: str, limit: int) -> int:
        """The last place before `limit`, if a text with this end has it there at all."""
        begin = max(limit - REACH, self._at)
        end = self._text.rfind(text[-PART:], begin, limit) + PART
        start = end - len(text)
        return start if start >= self._at and self._text.startswith(text, start) else -1

    def _forward(self, anchor: _Anchor, limit: int) -> int:
        """Find what is not found yet; the end of what was found last."""
        if anchor.start < 0:
            anchor.start = self._find(anchor.text, self._at, limit)
        if anchor.start >= 0:
            self._at = anchor.start + len(anchor.text)
        return self._at

    def _first(self, text: str, tools: bool) -> int:
        """The first turn, which is not in the segment of the system prompt or of the tools."""
        start, limit = -1, len(self._text)
        if self._at or tools:
            start = self._find(text, self._after(max(self._at, 1)), limit)
        return start if start >= 0 else self._find(text, self._at, limit)

    def _find(self, text: str, at: int, limit: int) -> int:
        """The first place, if what may still be looked at holds it."""
        start = self._seek(text[:PART], at, limit)
        if start < 0 or self._text.startswith(text, start):
            return start
        return self._seek(text, start, limit)

    def _seek(self, text: str, at: int, limit: int) -> int:
        end = max(at, min(limit, at + self._room))
        start = self._text.find(text, at, end)
        self._room -= (start if start >= 0 else end) - at
        return start

    def _end(self, anchor: _Anchor, end: int, following: int) -> int:
        """The edge behind a text that ends its message, if nothing else is in between."""
        after = self._after(end)
        near = after - end <= SLACK and after <= following
        return after if anchor.closes and near else end

    def _span(self, start: int, end: int, kind: str) -> None:
        if start < end:
            self.found.spans.append(PromptSpan(start, end, kind))

    def _segments(self, start: int, end: int) -> tuple[int, int]:
        """The edges around a text, or those within if more than the template's own is between."""
        before, after = self._before(start), self._after(end)
        return (
            before if start - before <= SLACK else self._after(start),
            after if after - end <= SLACK else self._before(end),
        )

    def _before(self, place: int) -> int:
        return self._edges[bisect_right(self._edges, place) - 1]

    def _after(self, place: int) -> int:
        return self._edges[min(bisect_left(self._edges, place), len(self._edges) - 1)]
