"""Rounds of a template's loops over messages that an earlier rendering has run with one result.

A template is a program, so its output for one turn need not begin the output for the next. But the
rounds of a loop of its outermost level read what can be told from its source: their item, the items
about it, variables from outside the loop, and attributes of namespaces, which they may also set. If
all of that is as it was, such rounds write what they wrote: the loop then begins behind them, with
their text written and the namespaces as they left them. Loops that read anything else stay as they
are.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jinja2
from jinja2.runtime import LoopContext, Macro
from jinja2.utils import Namespace

from kvmesh.frontend.turn_memo import TurnMemo, common

MIN_ROUNDS = 8
MAX_STATE = 64  # values in one that a loop sets
_ATTRIBUTES = "_Namespace__attrs"
_SCALARS = (str, int, float, bool, type(None))


class _KnownRounds(NamedTuple):
    """The first `number` rounds of a loop: their text, steps, and the namespaces behind them.

    `reach` is the largest index of `messages` that they read; `inputs` are the values of variables
    before them.
    """

    number: int
    text: str
    steps: int
    state: dict[str, dict[str, Any]]
    inputs: tuple[Any, ...]
    messages: list[Any]
    reach: int


class RunningLoop:
    """A loop of a rendering, which notes what its rounds but the last one do."""

    def __init__(self, items: list[Any], messages: list[Any], number: int) -> None:
        self.items = items
        self.messages = messages
        self.number = number
        self.inputs: tuple[Any, ...] = ()
        self.spaces: dict[str, Namespace] = {}
        self.known = 0
        self.at = 0
        self.cut = len(items) - 1
        self.reach = -1
        self.start = self.end = 0  # of its text among the parts of the output
        self.steps = 0
        self.left = 0  # steps, at its beginning
        self.state: dict[str, dict[str, Any]] | None = None


class Rendering:
    """One rendering: the steps and characters that are `left`, its output so far, its loops.

    `key` is the template.
    """

    __slots__ = ("key", "left", "loop", "loops", "memo", "parts", "room")

    def __init__(self, steps: int, room: int, key: Hashable, memo: TurnMemo | None) -> None:
        self.left = steps
        self.room = room
        self.key = key
        self.memo = memo
        self.parts: list[str] = []
        self.loop: RunningLoop | None = None
        self.loops: list[RunningLoop] = []

    def begin(
        self, items: Any, number: int, messages: Any, values: tuple[Any, ...], names: Sequence[str]
    ) -> Any:
        """The items of the rounds to run, of a loop over `items`."""
        self.loop = None
        if self.memo is None or type(items) is not list or type(messages) is not list:
            return items
        if len(items) < MIN_ROUNDS:
            return items
        loop = self.loop = RunningLoop(items, messages, number)
        loop.inputs = tuple(map(_frozen, values))
        pairs = zip(names, values, strict=True)
        loop.spaces = {name: value for name, value in pairs if type(value) is Namespace}
        loop.start, loop.left = len(self.parts), self.left
        self.loops.append(loop)
        same, known = self.memo.recall((self.key, number), items)
        if known is None or known.number >= same or not _all_same(known.inputs, loop.inputs):
            return items
        if known.reach >= common(known.messages, messages) or known.steps > self.left:
            return items
        loop.known = loop.at = known.number
        loop.reach = known.reach
        self.left -= known.steps
        self.room -= len(known.text)
        self.parts.append(known.text)
        for name, state in known.state.items():
            setattr(loop.spaces[name], _ATTRIBUTES, dict(state))
        return items[known.number :]

    def round(self, own: LoopContext | None) -> None:
        """Begin a round; `own` is its `loop`, if it reads that."""
        loop = self.loop
        if loop is None:
            return
        if own is not None and loop.at == loop.known > 0:
            own.index0 += loop.known
            own._before = loop.items[loop.known - 1]
        if loop.at == loop.cut:
            loop.end, loop.steps = len(self.parts), loop.left - self.left
            state = {name: dict(getattr(of, _ATTRIBUTES)) for name, of in loop.spaces.items()}
            if all(_is_plain(value) for each in state.values() for value in each.values()):
                loop.state = state
        loop.at += 1

    def item(self, messages: Any, index: Any) -> None:
        """Note that a round reads a message by its index; from the end, it depends on all."""
        loop = self.loop
        if loop is None:
            return
        if messages is loop.messages and type(index) is int and 0 <= index < len(messages):
            loop.reach = max(loop.reach, index)
        else:
            loop.cut = -1 if loop.at <= loop.cut else loop.cut

    def note(self) -> None:
        """Keep what the loops have done, once the rendering has ended well."""
        for loop in self.loops:
            if self.memo is not None and loop.state is not None:
                text = "".join(self.parts[loop.start : loop.end])
                rounds = _KnownRounds(
                    *(loop.cut, text, loop.steps, loop.state),
                    *(loop.inputs, loop.messages, loop.reach),
                )
                self.memo.note((self.key, loop.number), loop.items, rounds)


class _Attributes(NamedTuple):
    values: dict[str, Any]


def _frozen(value: Any) -> Any:
    """The part of a value that tells it from later ones; it does not refer to its rendering."""
    if type(value) is Namespace:
        return _Attributes({k: _frozen_scalar(v) for k, v in getattr(value, _ATTRIBUTES).items()})
    return _frozen_scalar(value)


def _frozen_scalar(value: Any) -> Any:
    if isinstance(value, jinja2.Undefined):
        return jinja2.Undefined
    return value._func.__code__ if type(value) is Macro else value


def _all_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    """True if a template cannot tell two values apart; False if in doubt."""
    if one is other:
        return type(one) is not Namespace
    if type(one) is not type(other):
        return False
    if isinstance(one, _SCALARS):
        return bool(one == other)
    if isinstance(one, _Attributes):
        return _same(one.values, other.values)
    if isinstance(one, list | tuple):
        return _all_same(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and _all_same([*one.values()], [*other.values()])
    return False


def _is_plain(value: Any) -> bool:
    """True for a value that another rendering may have as well."""
    return all(
        isinstance(each, (*_SCALARS, jinja2.Undefined)) for each in _leaves(value, MAX_STATE)
    )


def _leaves(value: Any, most: int) -> Iterator[Any]:
    """The value, or those in it; an iterator for too many."""
    if not isinstance(value, list | tuple | dict):
        yield value
    elif len(value) > most:
        yield iter(())
    else:
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each, most // 2)
