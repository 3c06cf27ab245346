"""Puts tool results behind the calls that they answer, in the order of these. Pure.

Clients send the results of parallel calls as they complete. Templates drop or rewrite the ids that
tell which result is whose, and a prompt must not depend on which tool was faster.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

from msgspec.structs import replace

from kvmesh.frontend.conversation import (
    Block,
    CacheControl,
    Message,
    ToolCall,
    ToolNotice,
    ToolResult,
)


def in_call_order(messages: list[Message]) -> list[Message]:
    """The messages with the results of each answer's calls first behind it.

    What else follows the answer comes after them in its own order: texts, a second result of a
    call, results of earlier answers or of no call. The same list if nothing moves.
    """
    found: list[Message] = []
    calls: list[str] = []
    moved = False
    for is_answer, group in groupby(messages, lambda message: message.role == "assistant"):
        run = list(group)
        if is_answer:
            calls = [b.id for m in run for b in m.blocks if isinstance(b, ToolCall)]
        elif calls and (arranged := _arranged(run, calls)) is not None:
            moved, run = True, arranged
        found += run
    return found if moved else messages


def _arranged(run: Sequence[Message], calls: Sequence[str]) -> list[Message] | None:
    """The messages behind an answer with `calls`; None if they are in order."""
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
    blocks = _with_marks([block for _, block in placed], order)
    origins = [placed[index][0] for index in order]
    together = groupby(zip(origins, blocks, strict=True), lambda pair: id(pair[0]))
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
