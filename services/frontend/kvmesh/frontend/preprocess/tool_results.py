"""Puts tool results behind the calls that they answer, in the order of these. Pure.

Clients send the results of parallel calls as they complete. Templates drop or rewrite the ids that
tell which result is whose, and a prompt must not depend on which tool was faster.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, islice, pairwise

from msgspec.structs import replace

from kvmesh.frontend.conversation import (
    Block,
    CacheControl,
    Message,
    ToolCall,
    ToolNotice,
    ToolResult,
)
from kvmesh.frontend.turn_memo import NO_MEMO, TurnMemo

_IN_ORDER = "results in the order of their calls"


def in_call_order(messages: list[Message], memo: TurnMemo = NO_MEMO) -> list[Message]:
    """The messages with the results of each answer's calls first behind it.

    What else follows the answer comes after them in its own order: texts, a second result of a
    call, results of earlier answers or of no call. The same list if nothing moves.
    """
    if len(messages) == 1:
        return messages
    same, _ = memo.recall(_IN_ORDER, messages)
    moved = [
        (first, end, arranged)
        for first, end, calls in _runs(messages, _answer_before(messages, same))
        if (arranged := _arranged(messages[first:end], calls)) is not None
    ]
    if not moved:
        memo.note(_IN_ORDER, messages, True)
        return messages
    found, done = list[Message](), 0
    for first, end, arranged in moved:
        found += messages[done:first]
        found += arranged
        done = end
    return found + messages[done:]


def _answer_before(messages: Sequence[Message], end: int) -> int:
    """The first message of the last answer that begins before `end`; 0 if there is none."""
    for index in range(end - 1, 0, -1):
        if messages[index].role == "assistant" != messages[index - 1].role:
            return index
    return 0


def _runs(messages: Sequence[Message], start: int) -> Iterator[tuple[int, int, list[str]]]:
    """The messages `first` to `end` (exclusive) behind each answer with calls, and their ids.

    `start` is 0 or the first message of an answer.
    """
    calls: list[str] = []
    first, behind = start, False
    for index in range(start, len(messages)):
        message = messages[index]
        if message.role != "assistant":
            if not behind:
                first, behind = index, True
            continue
        if behind:
            if calls:
                yield first, index, calls
            calls, behind = [], False
        for block in message.blocks:
            if type(block) is ToolCall:
                calls.append(block.id)
    if behind and calls:
        yield first, len(messages), calls


def _arranged(run: Sequence[Message], calls: list[str]) -> list[Message] | None:
    """The messages behind an answer with `calls`; None if they are in order."""
    if len(run[0].blocks) == 1 == len(calls):
        leading: Iterable[Block] = run[0].blocks
    else:
        leading = islice(chain.from_iterable(message.blocks for message in run), len(calls))
    if [getattr(block, "call_id", None) for block in leading] == calls:
        return None
    waiting: dict[str, deque[int]] = {}
    for number, call in enumerate(calls):
        waiting.setdefault(call, deque()).append(number)
    placed = [(message, block) for message in run for block in message.blocks]
    ranks = []
    for _, block in placed:
        numbers = waiting.get(block.call_id) if isinstance(block, ToolResult) else None
        ranks.append(numbers.popleft() if numbers else len(calls))
    if all(before <= after for before, after in pairwise(ranks)):
        return None
    order = sorted(range(len(placed)), key=ranks.__getitem__)
    shown = _with_marks([block for _, block in placed], order)
    origins = [placed[index][0] for index in order]
    together = groupby(zip(origins, shown, strict=True), lambda pair: id(pair[0]))
    pieces = [list(piece) for _, piece in together]
    return [Message(piece[0][0].role, [block for _, block in piece]) for piece in pieces]


def _with_marks(blocks: Sequence[Block], order: Sequence[int]) -> list[Block]:
    """The blocks in their new order. A cache mark ends behind all that it covered before."""
    places = [0] * len(order)
    for place, index in enumerate(order):
        places[index] = place
    ends = list(accumulate(places, max))
    moved = [_marked(blocks[index], None) for index in order]
    for block, end in zip(blocks, ends, strict=True):
        mark = _mark(block)
        while mark is not None and end > 0 and isinstance(moved[end], ToolNotice):
            end -= 1
        if mark is not None:
            longest = max(mark.ttl_s, (_mark(moved[end]) or mark).ttl_s)
            moved[end] = _marked(moved[end], CacheControl(longest))
    return moved


def _mark(block: Block) -> CacheControl | None:
    return getattr(block, "cache", None)


def _marked(block: Block, mark: CacheControl | None) -> Block:
    return replace(block, cache=mark) if hasattr(block, "cache") else block
