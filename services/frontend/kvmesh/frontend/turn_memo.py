"""Results of the work on a conversation, of which the next turn repeats only the end. Pure.

A request that continues an earlier one begins with the same message objects (`apis.turns`). Each
step of its preparation finds here how many of its items it has seen, and what it made of them.
"""

from collections.abc import Callable, Hashable, Sequence
from operator import is_not
from typing import Any, TypeVar

T = TypeVar("T")
MAX_STEPS = 32  # steps of all models that serve a conversation


class TurnMemo:
    """The last items and result of each step. Steps of different requests may interleave."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Sequence[Any], Any]] = {}

    def recall(self, step: Hashable, items: Sequence[object]) -> tuple[int, Any]:
        """The number of leading items that are those of the last time, and the result noted then.

        0 and None if there is none. `step` names all else that the result depends on.
        """
        known = self._known.get(step)
        return (0, None) if known is None else (common(known[0], items), known[1])

    def note(self, step: Hashable, items: Sequence[object], result: object) -> None:
        """Keep the result of a step for the next turn; nobody changes `items` and `result` then."""
        if len(self._known) >= MAX_STEPS and step not in self._known:
            self._known.clear()
        self._known[step] = items, result

    def same(self, step: Hashable, value: T) -> T:
        """The value of the last time if it is equal, so that it stays the same object."""
        _, earlier = self._known.get(step, ((), None))
        if type(earlier) is type(value) and earlier == value:
            return earlier
        self.note(step, (), value)
        return value

    def first(self, step: Hashable, items: Sequence[T], test: Callable[[T], bool]) -> int:
        """The index of the first item that passes a test, which is pure; else their number."""
        same, found = self.recall(step, items)
        first: int = same if found is None or found >= same else found
        if first == same:
            while first < len(items) and not test(items[first]):
                first += 1
        self.note(step, items, first)
        return first


class NoMemo(TurnMemo):
    """Of a request of which nothing is kept."""

    def note(self, step: Hashable, items: Sequence[object], result: object) -> None:
        """Keep nothing."""


NO_MEMO = NoMemo()


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """The number of leading items that are the same objects."""
    differs = [*map(is_not, one, other)]
    return differs.index(True) if True in differs else len(differs)
