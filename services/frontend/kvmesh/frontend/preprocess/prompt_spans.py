"""Character offsets of a conversation's blocks in its rendered prompt. Pure.

Templates copy texts verbatim and in order. The search finds long texts backwards from the end of
the prompt, each before the one after it, then short ones forwards between their long neighbours,
where the first match is the earliest possible offset. It covers only the newest turns and marked
blocks, since older blocks got their kinds when they were new. Absent texts cost a bounded number
of scans of the prompt, however many they are. The mark of a block that the template hides ends
with the text before it, or with the prompt if nothing follows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from msgspec import Struct

from kvmesh.frontend.conversation import (
    GAP,
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
from kvmesh.frontend.dialects.templates.chat_messages import BILLING_HEADER

PROBE = 64  # characters to search for; the rest of a text is compared
LONG = 64  # characters; shorter texts fill no block of their own
SLACK = 64  # characters that a template may add around a text
RECENT = 2  # newest assistant messages to search
REACH = 1 << 17  # characters to search between two texts
MAX_MISSES = 8
_MARKABLE: frozenset[type] = frozenset((Text, ToolResult, ToolCall, Image))
_RESULTS: frozenset[type] = frozenset((ToolResult,))


class PromptSpan(Struct, frozen=True):
    """The kind of the characters from `start` up to `end`."""

    start: int
    end: int
    kind: str


class PromptSpans(Struct):
    """Character offsets found in a prompt.

    `head`: end of the system prompt and tools; `spans`: parts of other kinds, in order; `marks`:
    (end, TTL in seconds) of each cache mark. The head and tool results are whole segments. Other
    ends move to a segment's edge if only text of the template is between.
    """

    head: int = 0
    spans: list[PromptSpan] = []
    marks: list[tuple[int, float]] = []


class _Anchor(Struct):
    """A text to find; `start` is -1 until found. `text` is "" for blocks without verbatim text.

    `closes`: it is the last block of its message; `last`: of the whole conversation.
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
    """Find the blocks of `request` in its rendered `text`, whose segments have these `edges`.

    Thinking gets spans only if the template drops it from later prompts.
    """
    messages = request.messages
    lead = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    marked = lead + request.memo.first("cache marks", messages[lead:], _is_marked)
    first = max(lead, min(marked, _first_recent(messages)))
    wanted = _MARKABLE if marked < len(messages) else _RESULTS
    search = _Search(text, edges)
    head = list(_anchors(messages[:lead], _MARKABLE))
    following = next(_anchors(messages[lead:], _MARKABLE), None)
    has_tools = any(not tool.deferred for tool in request.tools)
    ttls = [tool.cache.ttl_s for tool in request.tools if tool.cache is not None]
    search.head(head, following, has_tools, max(ttls, default=0.0))
    if drops_thinking:
        wanted |= {Thinking}
    if turns := list(_anchors(messages[first:], wanted)):
        search.turns(turns)
    return search.found


def _is_marked(message: Message) -> bool:
    """True if a block has a cache mark."""
    marks = (getattr(block, "cache", None) for block in message.blocks if type(block) in _MARKABLE)
    return any(mark is not None for mark in marks)


def _first_recent(messages: list[Message]) -> int:
    """Index of the first of the RECENT newest assistant messages."""
    count = 0
    for index in range(len(messages) - 1, -1, -1):
        count += messages[index].role == "assistant"
        if count == RECENT:
            return index
    return 0


def _anchors(messages: list[Message], wanted: frozenset[type]) -> Iterator[_Anchor]:
    for message in messages:
        for block in message.blocks:
            if type(block) not in wanted:
                continue
            text, kind = _text(block)
            cache: CacheControl | None = getattr(block, "cache", None)
            if (text and not text.startswith(BILLING_HEADER)) or cache is not None:
                closes = block is message.blocks[-1]
                yield _Anchor(text, kind, closes, closes and message is messages[-1], cache)


def _text(block: Block) -> tuple[str, str]:
    """Text and kind of a block; no text for blocks that templates do not write verbatim."""
    if isinstance(block, Text):
        return block.text.strip(), "conversation"
    if isinstance(block, ToolResult):
        return GAP.join(b.text for b in block.content if isinstance(b, Text)).strip(), "tool"
    if isinstance(block, Thinking):
        return block.text.strip(), "thinking"
    return "", "other"


class _Search:
    """A search for anchors in one text; `found` is its result."""

    def __init__(self, text: str, edges: Sequence[int]) -> None:
        self._text = text
        self._edges = edges
        self._pos = 0
        self._scan_budget = MAX_MISSES * len(text)
        self.found = PromptSpans()

    def head(
        self, anchors: list[_Anchor], following: _Anchor | None, tools: bool, tools_ttl: float
    ) -> None:
        """Find the head: everything before the segment of `following`, the first turn.

        The head contains the system prompt's `anchors`, and tools at any offset.
        """
        marks: list[tuple[int, float]] = []
        for anchor in anchors:
            self._forward(anchor, len(self._text))
            if anchor.cache is not None:
                marks.append((self._pos, anchor.cache.ttl_s))
        if following is not None and (start := self._first_turn(following.text, tools)) >= 0:
            self.found.head = self._edge_before(start)
        for end, ttl in marks:
            end = max(self.found.head, end) if end == self._pos else end
            self.found.marks.append((end, ttl))
        if tools_ttl:
            self.found.marks.append((self.found.head, tools_ttl))

    def turns(self, anchors: list[_Anchor]) -> None:
        """Find the spans and marks of `anchors`, which follow the head."""
        limits = self._backward(anchors)
        self._pos = max(self._pos, self.found.head)
        ends = [self._forward(*pair) for pair in zip(anchors, limits, strict=True)]
        followings = [*(anchor.start for anchor in anchors[1:]), len(self._text)]
        for anchor, end, following in zip(anchors, ends, followings, strict=False):
            if anchor.cache is not None:
                hidden = anchor.start < 0 or not anchor.text
                whole = hidden and anchor.last
                mark = len(self._text) if whole else self._end(anchor, end, following)
                self.found.marks.append((mark, anchor.cache.ttl_s))
            if anchor.start < 0 or not anchor.text:
                continue
            if anchor.kind == "tool":
                self._span(*self._segments(anchor.start, end), "tool")
            elif anchor.kind == "thinking":
                self._span(anchor.start, end, "thinking")

    def _backward(self, anchors: list[_Anchor]) -> list[int]:
        """Find long texts; return the offset by which each anchor must end."""
        limits = []
        limit, misses = len(self._text), 0
        for anchor in reversed(anchors):
            limits.append(limit)
            if len(anchor.text) >= LONG and misses < MAX_MISSES:
                anchor.start = self._find_last(anchor.text, limit)
                limit = anchor.start if anchor.start >= 0 else limit
                misses += anchor.start < 0
        return limits[::-1]

    def _find_last(self, text: str, limit: int) -> int:
        """Offset of `text` where its last PROBE characters last occur before `limit`; else -1."""
        begin = max(limit - REACH, self._pos)
        end = self._text.rfind(text[-PROBE:], begin, limit) + PROBE
        start = end - len(text)
        return start if start >= self._pos and self._text.startswith(text, start) else -1

    def _forward(self, anchor: _Anchor, limit: int) -> int:
        """Find the anchor unless it is known; return the end of the last anchor found."""
        if anchor.start < 0:
            anchor.start = self._find(anchor.text, self._pos, limit)
        if anchor.start >= 0:
            self._pos = anchor.start + len(anchor.text)
        return self._pos

    def _first_turn(self, text: str, tools: bool) -> int:
        """Offset of the first turn, preferably after the segment of system prompt or tools."""
        start, limit = -1, len(self._text)
        if self._pos or tools:
            start = self._find(text, self._edge_after(max(self._pos, 1)), limit)
        return start if start >= 0 else self._find(text, self._pos, limit)

    def _find(self, text: str, at: int, limit: int) -> int:
        """First offset of `text` from `at` on, -1 if it is not there or the budget is used up."""
        start = self._scan(text[:PROBE], at, limit)
        if start < 0 or self._text.startswith(text, start):
            return start
        return self._scan(text, start, limit)

    def _scan(self, text: str, at: int, limit: int) -> int:
        end = max(at, min(limit, at + self._scan_budget))
        start = self._text.find(text, at, end)
        self._scan_budget -= (start if start >= 0 else end) - at
        return start

    def _end(self, anchor: _Anchor, end: int, following: int) -> int:
        """The edge after a text that closes its message if only template text is between."""
        after = self._edge_after(end)
        near = after - end <= SLACK and after <= following
        return after if anchor.closes and near else end

    def _span(self, start: int, end: int, kind: str) -> None:
        if start < end:
            self.found.spans.append(PromptSpan(start, end, kind))

    def _segments(self, start: int, end: int) -> tuple[int, int]:
        """The edges around a text; inner ones where more than template text is between."""
        before, after = self._edge_before(start), self._edge_after(end)
        return (
            before if start - before <= SLACK else self._edge_after(start),
            after if after - end <= SLACK else self._edge_before(end),
        )

    def _edge_before(self, offset: int) -> int:
        return self._edges[bisect_right(self._edges, offset) - 1]

    def _edge_after(self, offset: int) -> int:
        return self._edges[min(bisect_left(self._edges, offset), len(self._edges) - 1)]
