"""Stop strings, log-probabilities and counts of thinking, over all ways to cut an output in tokens.

Stop strings end the visible text alone; the log-probabilities are those of the visible text, token
by token; neither depends on the tokens' borders or on how many arrive at once.
"""

import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.frontend.dialects.outputs import TOOLS

from kvmesh.frontend.apis.base import TokenLogprob
from kvmesh.frontend.apis.transcript import PartKind, Transcript
from kvmesh.frontend.conversation import AnswerEvent, TextDelta, ToolCallDelta
from kvmesh.frontend.dialects.output import OutputParser, PlainText, choose_grammar
from kvmesh.frontend.generation.output import OutputPipeline
from kvmesh.frontend.generation.text_logprobs import TextLogprobs
from kvmesh.frontend.tokenizer.detokenizer import ByteDetokenizer, ByteTable, TokenTexts

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "STOP}"}}\n</tool_call>'
HERMES = (
    "<think>\nI count one, STOP,\n\n🎉 three << 4.\n</think>\n\n"
    f"First 🎉 go ST.\n<<{CALL}\nSecond < line.\n\nThen STOP never.\n"
)
HARMONY = (
    "<|channel|>analysis<|message|>I count STOP.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>First ST<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>"
    '{"city": "STOP}"}<|call|>'
    "<|start|>assistant<|channel|>final<|message|>Second\n\nThen STOP never.<|return|>"
)
OUTPUTS = {
    "hermes": HERMES,
    "harmony": HARMONY,
    "plain": "First 🎉 go ST\n\nSecond STOP never.\n",
    "json": '{"a": "STOP🎉"}\n',
}
STOPS = [
    ["STOP"],
    ["\n\n"],
    ["}"],
    ["🎉"],
    ["never.\n", "absent"],
    ["T.\n\nSecond", "line"],
    ["n STOP n", "Then S"],
    ["count", "city", "tool_call"],
    ["<"],
    [],
]
Cuts = st.lists(st.integers(0, max(len(raw.encode()) for raw in OUTPUTS.values())), max_size=40)


def make_parser(name: str, eager: bool) -> OutputParser:
    if name in ("plain", "json"):
        return PlainText()
    tool, reasoning = ("hermes", "qwen3") if name == "hermes" else ("harmony", "harmony")
    grammar = choose_grammar("", tool_parser=tool, reasoning_parser=reasoning)
    return grammar.parser(TOOLS, eager=eager, new_id=lambda: "id")


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """Tokens of an output; a mark of its syntax ends one, so that none has parts of two texts."""
    marks = [match.end() for match in re.finditer(rb"</?t\w+>|<\|\w+\|>", data)]
    edges = sorted({0, len(data), *marks, *(at % (len(data) + 1) for at in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


class Run(NamedTuple):
    parts: list[tuple[PartKind, str]]
    stopped_by: str | None
    reasoning: int
    logged: list[TokenLogprob]
    complete: bool

    def text(self, kind: PartKind) -> list[str]:
        return [text for found, text in self.parts if found is kind]


def run(
    parser: OutputParser,
    tokens: list[bytes],
    stops: list[str],
    batches: list[int],
    logged: bool = False,
    **options: Any,
) -> Run:
    """The output of `tokens`, of which as many arrive at once as `batches` says, in turn."""
    table = cast(ByteTable, SimpleNamespace(table=tokens))
    texts = cast(
        TokenTexts,
        SimpleNamespace(token_bytes=tokens.__getitem__, is_shown=lambda token: True),
    )
    logprobs = TextLogprobs(parser, texts, 1) if logged else None
    made = OutputPipeline(ByteDetokenizer(table), stops, logprobs or parser, **options)
    transcript, entries = Transcript(), []

    def show(events: list[AnswerEvent], found: list[TokenLogprob]) -> None:
        for event in events:
            assert not isinstance(event, TextDelta | ToolCallDelta) or event != TextDelta("")
            transcript.add(event)
        if found:
            (event,) = events
            assert isinstance(event, TextDelta)
            shown = b"".join(bytes(entry.bytes) for entry in found)
            assert event.text.encode().endswith(shown)
            entries.extend(found)

    ids = list(range(len(tokens)))
    turn = 0
    while ids and not made.complete:
        size = 1 if logged else batches[turn % len(batches)]
        batch, ids = ids[:size], ids[size:]
        turn += 1
        if logprobs is None:
            show(made.feed(batch), [])
            continue
        logprobs.add(batch[0], {batch[0]: -float(batch[0])})
        for event, found in logprobs.settle(made.feed(batch)):
            show([event], found)
    events = made.finish()
    if logprobs is None:
        show(events, [])
    else:
        for event, found in [*logprobs.settle(events), *logprobs.flush()]:
            show([event], found)
    parts = [(part.kind, part.text) for part in transcript.parts]
    return Run(parts, made.stopped_by, made.reasoning_tokens, entries, made.complete)


def expected(
    whole: list[tuple[PartKind, str]], stops: list[str]
) -> tuple[list[tuple[PartKind, str]], str | None]:
    """The parts up to the stop string that ends first in a text; of those, that begins first."""
    shown: list[tuple[PartKind, str]] = []
    for kind, text in whole:
        found = [
            (text.find(stop) + len(stop), stop)
            for stop in stops
            if kind is PartKind.TEXT and stop in text
        ]
        if found:
            end = min(found)[0]
            start, stop = min((at - len(stop), stop) for at, stop in found if at == end)
            return [*shown, *([(kind, text[:start])] if start else [])], stop
        shown.append((kind, text))
    return shown, None


@pytest.mark.parametrize("logged", [False, True], ids=["plain", "logprobs"])
@pytest.mark.parametrize("name", OUTPUTS)
@settings(max_examples=30)
@given(st.sampled_from(STOPS), Cuts, st.lists(st.integers(1, 9), min_size=1), st.booleans())
def test_stop_strings_end_visible_text_alone(
    name: str, logged: bool, stops: list[str], cuts: list[int], batches: list[int], eager: bool
) -> None:
    raw = OUTPUTS[name]
    whole = run(make_parser(name, eager), [raw.encode()], [], [1]).parts
    found = run(make_parser(name, eager), cut(raw.encode(), cuts), stops, batches, logged)
    parts, stop = expected(whole, stops)
    assert found.parts == parts
    assert (found.stopped_by is None) == (stop is None)
    assert found.complete == (stop is not None)


@pytest.mark.parametrize("name", OUTPUTS)
@settings(max_examples=30)
@given(st.sampled_from(STOPS), Cuts, st.booleans())
def test_the_log_probabilities_are_those_of_the_visible_text(
    name: str, stops: list[str], cuts: list[int], eager: bool
) -> None:
    tokens = cut(OUTPUTS[name].encode(), cuts)
    found = run(make_parser(name, eager), tokens, stops, [1], logged=True)
    listed = [int(-entry.logprob) for entry in found.logged]
    assert listed == sorted(set(listed))
    for at, entry in zip(listed, found.logged, strict=True):
        # the rest of a character is listed with the token that completes it
        shown = bytes(entry.bytes)
        assert shown in b"".join(tokens[max(at - 4, 0) : at + 1])
        assert entry.top_logprobs[0].bytes == list(tokens[at])
    shown = b"".join(bytes(entry.bytes) for entry in found.logged)
    texts = found.text(PartKind.TEXT)
    assert shown == "".join(texts).encode()


@pytest.mark.parametrize("name", ["hermes", "harmony"])
@settings(max_examples=30)
@given(Cuts, st.lists(st.integers(1, 30), min_size=1), st.booleans())
def test_the_count_of_thinking_does_not_depend_on_what_arrives_at_once(
    name: str, cuts: list[int], batches: list[int], eager: bool
) -> None:
    tokens = cut(OUTPUTS[name].encode(), cuts)
    one = run(make_parser(name, eager), tokens, [], [1])
    many = run(make_parser(name, eager), tokens, [], batches)
    assert many.reasoning == one.reasoning
    # tokens of which any part is in the thinking, but for blanks and marks around it
    (thinking,) = one.text(PartKind.THINKING)
    start = OUTPUTS[name].encode().find(thinking.encode())
    end = start + len(thinking.encode())
    at, within = 0, 0
    for token in tokens:
        within += at < end and at + len(token) > start
        at += len(token)
    assert one.reasoning == within
