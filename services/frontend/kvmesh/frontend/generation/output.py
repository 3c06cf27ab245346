"""Output pipeline of one sequence, from tokens to events: detokenize, stop strings, parse. Pure."""

from kvmesh.frontend.conversation import AnswerEvent, TextDelta, ThinkingDelta, ToolCallEnd
from kvmesh.frontend.dialects.output import OutputParser
from kvmesh.frontend.generation.stop_strings import StopMatcher
from kvmesh.frontend.tokenizer.detokenizer import Detokenizer


class OutputPipeline:
    """State between one sequence's tokens and its events.

    With `one_call` the answer ends with its first tool call: it is `complete` once the model goes
    on after that, and later tokens are to be dropped. The model may write the end of the call's
    syntax, so that later prompts can show the answer as it was generated.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: list[str],
        parser: OutputParser,
        one_call: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._may_stop = bool(stops)
        self._parser = parser
        self._one_call = one_call
        self._called = False
        self._reasoning = 0.0
        self.complete = False

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found; the text after it is dropped."""
        return self._stops.matched

    @property
    def reasoning_tokens(self) -> int:
        return round(self._reasoning)

    def feed(self, ids: list[int]) -> list[AnswerEvent]:
        text = self._detokenizer.feed(ids)
        if self._may_stop:
            text = self._stops.feed(text)
        if not text:
            return []
        events = self._parser.feed(text)
        if self._one_call:
            events = self._first_call(events)
        if events and type(events[0]) is ThinkingDelta:
            self._reasoning += len(ids) * _reasoning_share(events)
        return events

    def finish(self) -> list[AnswerEvent]:
        """Return the events held back; call it once, after the last tokens."""
        if self.complete:
            return []
        text = self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
        events = self._parser.feed(text) if text else []
        events += self._parser.finish()
        return self._first_call(events) if self._one_call else events

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


def _is_blank(event: AnswerEvent) -> bool:
    return isinstance(event, TextDelta) and not event.text.strip()


def _reasoning_share(events: list[AnswerEvent]) -> float:
    """The share of reasoning in a batch of events, by length."""
    thinking = sum(len(e.text) for e in events if isinstance(e, ThinkingDelta))
    others = sum(
        len(getattr(e, "text", "") or getattr(e, "arguments", ""))
        for e in events
        if not isinstance(e, ThinkingDelta)
    )
    return thinking / (thinking + others) if thinking else 0.0
