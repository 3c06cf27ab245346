"""Classes of prompts by what their session waits for, its agent, and its turns, coarse to fine."""

from collections import OrderedDict
from math import log2
from typing import NamedTuple

MAX_NAME = 48  # characters
MAX_NAMES = 128  # of one owner
MAX_OWNERS = 1024
UNUSED_S = 6 * 3600.0  # after which a name gives its place to another
COARSEST = frozenset(("tool", "human", "end"))  # that need no place
MAX_WAITS = 4  # a tool, its name, the class of its command, the length of a sleep
OTHER = "other"


class ClassKey(NamedTuple):
    """A class; coarser classes have fewer waits and less history."""

    waits: tuple[str, ...] = ()
    agent: str = ""
    history: tuple[int, ...] = ()


class TurnHistory(NamedTuple):
    """Features of a turn that has ended: earlier turns of its conversation, tokens, seconds.

    `new_tokens` is the part of the prompt after the previous turn's; `pause_s` the time from the
    end of the previous turn to the arrival of this one, None if it is the first.
    """

    turn: int
    new_tokens: int
    output_tokens: int
    pause_s: float | None


class ClassNames:
    """Bounds the names that each owner brings into classes: callers choose them."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, OrderedDict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        """The owners with names."""
        return len(self._names)

    def known(self, owner: str, name: str, now: float) -> str:
        """The name, cut to MAX_NAME; OTHER if the owner has lately used MAX_NAMES others."""
        if name in COARSEST:
            return name
        names = self._names.get(owner)
        if names is None:
            names = self._names[owner] = OrderedDict()
            if len(self._names) > MAX_OWNERS:
                self._names.popitem(last=False)
        self._names.move_to_end(owner)
        name = name[:MAX_NAME]
        if name not in names and len(names) >= MAX_NAMES:
            if now - next(iter(names.values())) < UNUSED_S:
                return OTHER
            names.popitem(last=False)
        names[name] = now
        names.move_to_end(name)
        return name


def class_keys(waits: tuple[str, ...], agent: str, history: TurnHistory) -> list[ClassKey]:
    """The classes of a turn, from the coarsest, which has all turns, to the finest."""
    keys = [ClassKey(waits[:count]) for count in range(len(waits) + 1)]
    if agent:
        keys.append(ClassKey(waits, agent))
    new = _octave(history.new_tokens, 8, 14) // 2
    turn = min(history.turn, 8)
    output = _octave(history.output_tokens, 4, 10) // 2
    pause = -1 if history.pause_s is None else _octave(history.pause_s, 2, 10) // 2
    steps = ((min(turn, 1), new), (turn, new), (turn, new, output), (turn, new, output, pause))
    keys += [ClassKey(waits, agent, each) for each in steps]
    return keys


def _octave(amount: float, least: int, most: int) -> int:
    """The binary logarithm, rounded down, within bounds."""
    return min(max(int(log2(max(amount, 1.0))), least), most)
