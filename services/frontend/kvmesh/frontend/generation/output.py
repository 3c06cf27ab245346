"""Output pipeline of one sequence, from tokens to events: detokenize, parse, stop strings. Pure."""

from functools import lru_cache

from kvmesh.frontend.conversation import AnswerEvent, TextDelta, ThinkingDelta, ToolCallEnd
from kvmesh.frontend.dialects.output import OutputParser
from kvmesh.frontend.tokenizer.detokenizer import Detokenizer


class StopMatcher:
    """Scans text as it arrives; after a match `matched` is set and no more text passes.

    It is the algorithm of Knuth, Morris and Pratt: the cost per character depends neither on the
    length of the stop strings nor on how much of one has been seen.
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._borders = [borders(stop) for stop in self._stops]
        self._seen = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text to show now; text that could begin a stop string is held back."""
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        found = [
            (end, index) for index in range(len(self._stops)) if (end := self._scan(index, text))
        ]
        text = self._held + text
        if found:
            start, index = min((end - len(self._stops[index]), index) for end, index in found)
            shown = text[: len(self._held) + start]
            self._held = ""
            self.matched = self._stops[index]
            return shown
        held = max(self._seen)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _scan(self, index: int, text: str) -> int:
        """The offset in `text` at which stop string `index` first ends; 0 if it does not."""
        stop, back, seen = self._stops[index], self._borders[index], self._seen[index]
        for end, char in enumerate(text, 1):
            while seen and stop[seen] != char:
                seen = back[seen - 1]
            seen += stop[seen] == char
            if seen == len(stop):
                return end
        self._seen[index] = seen
        return 0

    def finish(self) -> str:
        """Return the text held back, which has not become a stop string; begin anew."""
        held, self._held = self._held, ""
        self._seen = [0] * len(self._stops)
        return "" if self.matched is not None else held


NO_STOPS = StopMatcher([])  # has no state


@lru_cache(maxsize=512)
def borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also a suffix of it."""
    found, size = [0], 0
    for char in stop[1:]:
        while size and stop[size] != char:
            size = found[size - 1]
        size += stop[size] == char
        found.append(size)
    return found


class OutputPipeline:
    """State between one sequence's tokens and its events.

    Stop strings end the visible text: they are not searched for in thinking and calls, in text
    across those, nor in the text of the first `min_tokens` tokens. With `one_call` the answer ends
    with its first tool call, once the model goes on after that; the model may write the end of the
    call's syntax, so that later prompts can show the answer as it was generated. The answer is
    `complete` once one of the two has ended it, and later tokens are to be dropped.
    `reasoning_tokens` is the number of tokens with text of thinking.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: list[str],
        parser: OutputParser,
        one_call: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops) if stops else NO_STOPS
        self._parser = parser
        self._one_call = one_call
        self._called = False
        self._ends_early = bool(stops) or one_call
        self._exempt = min_tokens if stops else 0
        self._thinks = False
        self._undecided = 0  # tokens after the last thinking, which may belong to it
        self.reasoning_tokens = 0
        self.complete = False
        self.began = False  # there were events

    @property
    def thinks(self) -> bool:
        """True if the last event was thinking."""
        return self._thinks

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found; the text after it is dropped."""
        return self._stops.matched

    def feed(self, ids: list[int]) -> list[AnswerEvent]:
        if self._exempt:
            return self._feed_exempt(ids)
        text = self._detokenizer.feed(ids)
        events = self._parser.feed(text) if text else []
        if not events:
            if self._thinks:
                self._undecided += len(ids)
            return events
        self.began = True
        if len(events) > 1 or type(events[0]) is ThinkingDelta:
            self._count(events, ids, text)
        elif self._thinks:
            self._thinks = False
        return self._visible(events) if self._ends_early else events

    def finish(self) -> list[AnswerEvent]:
        """Return the events held back; call it once, after the last tokens."""
        if self.complete:
            return []
        self._exempt = 0
        text = self._detokenizer.finish()
        events = self._visible(self._parser.feed(text)) if text else []
        if self._stops.matched is not None:
            return events
        in_call = self._parser.in_call
        rest = self._parser.finish()
        if self._thinks and rest and type(rest[0]) is ThinkingDelta:
            self.reasoning_tokens += self._undecided
        if in_call:
            # the text of a call that has broken off
            events += self._unstopped(self._first_call(rest) if self._one_call else rest)
        else:
            events += self._visible(rest)
        held = self._stops.finish()
        return [*events, TextDelta(held)] if held else events

    def _feed_exempt(self, ids: list[int]) -> list[AnswerEvent]:
        first, rest = ids[: self._exempt], ids[self._exempt :]
        left, self._exempt = self._exempt - len(first), 0
        stops, self._stops = self._stops, NO_STOPS
        events = self.feed(first)
        self._exempt, self._stops = left, stops
        return events + self.feed(rest) if rest and not self.complete else events

    # --- the end of the answer ---

    def _visible(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        """The events up to a stop string, or the end of the first call if it is to be the last."""
        if self._one_call:
            events = self._first_call(events)
        shown: list[AnswerEvent] = []
        for event in events:
            if type(event) is not TextDelta:
                shown += self._unstopped([event])
            elif text := self._stops.feed(event.text):
                shown.append(TextDelta(text))
            if self._stops.matched is not None:
                self.complete = True
                break
        return shown

    def _unstopped(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        """The text held back before `events`, and those."""
        held = self._stops.finish() if events else ""
        return [TextDelta(held), *events] if held else events

    def _first_call(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        """The events up to the end of the first call."""
        if self._called:
            self.complete = self.complete or not all(map(_is_blank, events))
            return []
        for index, event in enumerate(events):
            if type(event) is ToolCallEnd:
                self._called = True
                self.complete = not all(map(_is_blank, events[index + 1 :]))
                return events[: index + 1]
        return events

    # --- tokens of thinking ---

    def _count(self, events: list[AnswerEvent], ids: list[int], text: str) -> None:
        """Count the tokens of `ids` that hold the thinking among `events`, read from `text`."""
        done = last = 0
        for event in events:
            if isinstance(event, ThinkingDelta):
                start, done = _span(text, event.text, done)
                first, last = self._detokenizer.tokens_of(ids, text, start, done)
                # tokens without text inside of the thinking belong to it
                self.reasoning_tokens += last + self._undecided if self._thinks else last - first
            elif isinstance(event, TextDelta):
                done = _span(text, event.text, done)[1]
            self._thinks = isinstance(event, ThinkingDelta)
        if self._thinks:
            self._undecided = len(ids) - last


def _is_blank(event: AnswerEvent) -> bool:
    return isinstance(event, TextDelta) and not event.text.strip()


def _span(text: str, part: str, start: int) -> tuple[int, int]:
    """The place of `part` in `text` from `start` on; its beginning may be from earlier text."""
    found = text.find(part, start)
    if found >= 0:
        return found, found + len(part)
    for held in range(1, len(part)):
        if text.startswith(part[held : held + 64]) and text.startswith(part[held:]):
            return 0, len(part) - held
    return start, start
