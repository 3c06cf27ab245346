"""From tokens to answer events: detokenize, cut at stop strings, parse. Pure, one per sequence."""

from kvmesh.frontend.conversation import AnswerEvent, TextDelta
from kvmesh.frontend.dialects.output import OutputParser
from kvmesh.frontend.generation.stop_strings import StopMatcher
from kvmesh.frontend.tokenizer.detokenizer import Detokenizer


class PlainText:
    """The parser of models that write nothing but text, and of raw completions."""

    def feed(self, text: str) -> list[AnswerEvent]:
        return [TextDelta(text)]

    def finish(self) -> list[AnswerEvent]:
        return []


class OutputPipeline:
    """State between one sequence's tokens and its events."""

    def __init__(self, detokenizer: Detokenizer, stops: list[str], parser: OutputParser) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._may_stop = bool(stops)
        self._parser = parser

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was met; what follows it is dropped."""
        return self._stops.matched

    def feed(self, ids: list[int]) -> list[AnswerEvent]:
        text = self._detokenizer.feed(ids)
        if self._may_stop:
            text = self._stops.feed(text)
        return self._parser.feed(text) if text else []

    def finish(self) -> list[AnswerEvent]:
        """Everything still held back; call once, after the last tokens."""
        text = self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
        events = self._parser.feed(text) if text else []
        return events + self._parser.finish()
