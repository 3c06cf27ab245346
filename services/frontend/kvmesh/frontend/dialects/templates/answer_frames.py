"""Shows answers in a rendered conversation as they were generated, token by token. Pure.

Only its code states how a template writes an answer. So the conversation is rendered with markers
in the place of an answer's texts, and the text from the start of the answer to its end, as a small
conversation with the same markers shows it, is replaced by what the model generated.
"""

import re
import secrets
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from kvmesh.frontend.conversation import Generated, Insertion, RenderedPrompt
from kvmesh.frontend.dialects.templates.prompt_json import RepeatedEntry

# A client cannot write a marker that it cannot guess. Letters and digits pass every filter alike.
_KEY = f"kvm{secrets.token_hex(8)}n"
_MARKER = re.compile(rf"{_KEY}(\d+)([tac])")
MAX_MARKED = 4096  # answers whose markers are kept
MAX_FRAME = 4096  # characters that a template writes on one side of the markers


class MarkedAnswer(NamedTuple):
    """An answer that is rendered as markers, `number` among those of its conversation.

    `text`: it has a marker for its text, even if there is none. `calls` are the names of its calls;
    `after_result`: it follows a tool's result. `earlier_calls` come before its own.
    """

    number: int
    generated: Generated
    thinking: bool
    text: bool
    calls: tuple[str, ...]
    after_result: bool
    earlier_calls: int


class AnswerFrame(NamedTuple):
    """The text of a template around the markers of an answer.

    `header` begins the answer's turn, `before` and `after` are parts of the answer; `opening` is
    what the model was given of the answer. `kinds` are those of the markers, in order; `shows_ids`:
    the answer shows the ids of its calls.
    """

    header: str
    before: str
    opening: str
    after: str
    kinds: str
    shows_ids: bool


class Markers(NamedTuple):
    """The markers of an answer: its thinking, its text, and the arguments of its last call."""

    thinking: str
    text: str
    arguments: RepeatedEntry


@lru_cache(MAX_MARKED)
def markers(number: int) -> Markers:
    """The markers of the answer `number`."""
    name = _marker(number, "c")
    return Markers(_marker(number, "t"), _marker(number, "a"), RepeatedEntry({name: name}))


def answer_frame(
    before: str, answer: MarkedAnswer, shown: str, ends: frozenset[str], ids: Sequence[str]
) -> AnswerFrame | None:
    """The frame of an answer, whose markers a small conversation shows.

    `before` is that conversation without the answer, `shown` the conversation with it. `ends` are
    the tokens that end a turn, `ids` the ids of the answer's calls. None if the template does not
    show the answer, or its bounds cannot be told.
    """
    found = list(_found(shown))
    if not found or not shown.startswith(before):
        return None
    kinds = "".join(match[2] for match in found)
    if not re.fullmatch(_kinds(answer), kinds):
        return None
    first, last = found[0].start(), found[-1].end()
    opening = answer.generated.opening
    start = len(before) + _common(opening, shown[len(before) : first])
    end = last
    if answer.calls:
        positions = [at for token in ends if (at := shown.find(token, last)) >= 0]
        if not positions:
            return None
        end = min(positions)
    frame = AnswerFrame(
        shown[len(before) : start],
        shown[start:first],
        opening[start - len(before) :],
        shown[last:end],
        kinds,
        any(name in shown[start:end] for name in ids),
    )
    return frame if max(map(len, frame[:4])) <= MAX_FRAME else None


class MarkedText:
    """A rendered conversation with markers; answers are inserted in the order of the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._places: dict[int, tuple[int, int, str]] = {}
        for match in _found(text):
            number = int(match[1])
            start, _, kinds = self._places.get(number, (match.start(), 0, ""))
            self._places[number] = start, match.end(), kinds + match[2]
        self._pieces: list[str] = []
        self._length = 0
        self._done = 0
        self._insertions: list[Insertion] = []

    def insert(self, answer: MarkedAnswer, frame: AnswerFrame) -> bool:
        """Insert an answer; False if the text does not show it as its frame does."""
        place = self._places.get(answer.number)
        if place is None or place[2] != frame.kinds:
            return False
        header = place[0] - len(frame.before) - len(frame.header)
        start, end = header + len(frame.header), place[1] + len(frame.after)
        shown = self._text.startswith(frame.header + frame.before, max(header, 0))
        if header < self._done or not shown or not self._text.startswith(frame.after, place[1]):
            return False
        self._add(self._text[self._done : start])
        self._add(frame.opening)
        begin = self._length
        self._add(answer.generated.text)
        self._insertions.append(Insertion(begin, self._length, answer.generated.tokens))
        self._done = end
        return True

    def finish(self) -> RenderedPrompt:
        self._add(self._text[self._done :])
        return RenderedPrompt("".join(self._pieces), self._insertions)

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        self._length += len(text)


def _found(text: str) -> Iterator[re.Match[str]]:
    """The markers in a text."""
    at = text.find(_KEY)  # much faster in a long text than the pattern
    while at >= 0:
        if (match := _MARKER.match(text, at)) is not None:
            yield match
        at = text.find(_KEY, at + 1)


def _kinds(answer: MarkedAnswer) -> str:
    """A pattern of the kinds of an answer's markers: one for each text, two for an argument."""
    text = "a?" if answer.calls else "a"
    return ("t" if answer.thinking else "") + text + ("cc" if answer.calls else "")


def _marker(number: int, kind: str) -> str:
    return f"{_KEY}{number}{kind}"


def _common(one: str, other: str) -> int:
    """The number of leading characters that two texts share."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)
