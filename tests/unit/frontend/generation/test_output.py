"""Output pipeline: the end of an answer at its first call, or not before its least tokens."""

from kvmesh.frontend.conversation import (
    AnswerEvent,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from kvmesh.frontend.dialects.output import PlainText
from kvmesh.frontend.generation.output import OutputPipeline
from kvmesh.frontend.tokenizer.detokenizer import Detokenizer


class Letters:
    """A detokenizer of one character per token."""

    def feed(self, ids: list[int]) -> str:
        return "".join(chr(token) for token in ids)

    def finish(self) -> str:
        return ""

    def tokens_of(self, ids: list[int], text: str, start: int, end: int) -> tuple[int, int]:
        return start, end


class Scripted:
    """A parser that returns the next of its results, whatever the text."""

    in_call = False

    def __init__(self, *results: list[AnswerEvent]) -> None:
        self._results = list(results)

    def feed(self, text: str) -> list[AnswerEvent]:
        return self._results.pop(0)

    def finish(self) -> list[AnswerEvent]:
        return [TextDelta("rest")]


def pipeline(*results: list[AnswerEvent], one_call: bool = False) -> OutputPipeline:
    letters: Detokenizer = Letters()
    return OutputPipeline(letters, [], Scripted(*results), one_call)


def test_with_one_call_the_answer_ends_with_the_first() -> None:
    call: list[AnswerEvent] = [ToolCallStart("c", "f"), ToolCallDelta("{}"), ToolCallEnd()]
    made = pipeline([*call, ToolCallStart("d", "g")], one_call=True)
    assert made.feed([65]) == call
    assert made.complete
    assert made.finish() == []


def test_with_one_call_the_model_writes_the_end_of_the_calls_syntax() -> None:
    call: list[AnswerEvent] = [ToolCallStart("c", "f"), ToolCallDelta("{}"), ToolCallEnd()]
    made = pipeline(call, [TextDelta("\n")], [TextDelta("So")], one_call=True)
    assert made.feed([65]) == call
    assert made.feed([65]) == []
    assert not made.complete
    assert made.feed([65]) == []
    assert made.complete


def test_otherwise_calls_follow_one_another_and_the_rest_follows_them() -> None:
    events: list[AnswerEvent] = [ToolCallStart("c", "f"), ToolCallEnd(), ToolCallStart("d", "g")]
    made = pipeline(events)
    assert made.feed([65]) == events
    assert not made.complete
    assert made.finish() == [TextDelta("rest")]


def test_stop_strings_do_not_end_the_first_tokens() -> None:
    letters: Detokenizer = Letters()
    made = OutputPipeline(letters, ["b"], PlainText(), min_tokens=3)
    ids = [ord(letter) for letter in "ababab"]
    assert made.feed(ids[:1]) == [TextDelta("a")]
    assert made.feed(ids[1:]) == [TextDelta("ba")]
    assert made.complete
    assert made.stopped_by == "b"
