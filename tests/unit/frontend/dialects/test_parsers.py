"""Every parser on its family's published format, split and truncated anywhere."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.frontend.dialects.outputs import CASES, Case, complete_calls, parts, pieces, read
from unit.frontend.dialects.written import FAMILIES

from kvmesh.frontend.conversation import AnswerEvent, ToolCallEnd, ToolCallStart
from kvmesh.frontend.dialects.families import (
    CHANNELS,
    REASONING_ALIASES,
    REASONING_PARSERS,
    TOOL_PARSERS,
)
from kvmesh.frontend.dialects.preview import merge_deltas

cases = pytest.mark.parametrize("case", CASES, ids=[case.title for case in CASES])
eagerness = pytest.mark.parametrize("eager", [True, False], ids=["eager", "whole"])


def test_every_parser_has_a_case() -> None:
    """Here, or among the families of `test_families`."""
    grammars = [c.parser_names for c in CASES] + [f.parser_names for f in FAMILIES]
    assert {tool for tool, _ in grammars} >= {*TOOL_PARSERS, *CHANNELS, "harmony"}
    assert {reasoning for _, reasoning in grammars} >= {*REASONING_PARSERS, "harmony"}


@cases
@eagerness
def test_the_published_format_is_parsed(case: Case, eager: bool) -> None:
    events = read(case.parser(eager), [case.raw])
    assert pieces(events) == case.pieces
    assert complete_calls(events) == sum(kind == "call" for kind, _, _ in case.pieces)


@cases
@eagerness
def test_the_result_does_not_depend_on_one_split(case: Case, eager: bool) -> None:
    for cut in range(len(case.raw) + 1):
        events = read(case.parser(eager), [case.raw[:cut], case.raw[cut:]])
        assert pieces(events) == case.pieces, cut
    assert pieces(read(case.parser(eager), case.raw)) == case.pieces


@cases
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_result_does_not_depend_on_many_splits(case: Case, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(case.raw)), max_size=12)))
    edges = [0, *cuts, len(case.raw)]
    chunks = [case.raw[a:b] for a, b in pairwise(edges)]
    assert pieces(read(case.parser(True), chunks)) == case.pieces


@cases
def test_a_truncated_output_keeps_its_text(case: Case) -> None:
    """Calls are complete or text; all text outside complete calls is emitted."""
    whole = [piece for piece in case.pieces if piece[0] == "call"]
    for end in range(len(case.raw)):
        raw = case.raw[:end]
        found = pieces(read(case.parser(False), parts(raw)))
        calls = [piece for piece in found if piece[0] == "call"]
        assert calls == whole[: len(calls)]
        if not calls and "harmony" not in (case.tool, case.reasoning):
            rest = "".join(content for _, _, content in found)
            assert _letters(_unmarked(case, raw)) == _letters(_unmarked(case, rest)), end


def _letters(text: str) -> str:
    return "".join(text.split())


def _unmarked(case: Case, text: str) -> str:
    name = case.reasoning or ""
    reasoning = REASONING_PARSERS.get(REASONING_ALIASES.get(name, name))
    for marker in (*reasoning.begin, *reasoning.end) if reasoning else ():
        text = text.replace(marker, "", 1)
    return text


@cases
def test_arguments_of_a_truncated_output_are_a_prefix(case: Case) -> None:
    whole = [
        content
        for kind, _, content in merge_deltas(read(case.parser(True), case.raw))
        if kind == "call"
    ]
    for end in range(len(case.raw)):
        events = read(case.parser(True), parts(case.raw[:end]))
        calls = [content for kind, _, content in merge_deltas(events) if kind == "call"]
        assert all(a.startswith(b) for a, b in zip(whole, calls, strict=False)), end
        assert complete_calls(events) in (len(calls), len(calls) - 1)


FIRST = {case.tool: case for case in reversed(CASES) if case.tool}


@pytest.mark.parametrize("case", FIRST.values(), ids=list(FIRST))
def test_calls_are_emitted_while_they_arrive(case: Case) -> None:
    """A call with arguments begins well before it ends."""
    parser = case.parser(True)
    starts, ends = [], []
    for place, char in enumerate(case.raw):
        events: list[AnswerEvent] = parser.feed(char)
        starts += [place for event in events if isinstance(event, ToolCallStart)]
        ends += [place for event in events if isinstance(event, ToolCallEnd)]
    calls = [arguments for kind, _, arguments in case.pieces if kind == "call"]
    for start, end, arguments in zip(starts, ends, calls, strict=False):
        assert not arguments or end - start > 50


MARKS = 6  # characters after a call that end its list, or show that a quote has ended its text


@cases
@eagerness
def test_a_call_ends_as_soon_as_it_is_complete(case: Case, eager: bool) -> None:
    """Harnesses may start a tool while the model goes on."""
    parser, ends = case.parser(eager), list[int]()
    for place, char in enumerate(case.raw, 1):
        ends += [place for event in parser.feed(char) if isinstance(event, ToolCallEnd)]
    assert len(ends) == complete_calls(read(case.parser(eager), [case.raw]))
    for before, end in enumerate(ends):
        earlier = read(case.parser(eager), [case.raw[: end - MARKS - 1]])
        assert complete_calls(earlier) <= before, case.raw[:end]


@eagerness
def test_two_messages_of_text_stay_apart(eager: bool) -> None:
    raw = (
        "<|channel|>commentary<|message|>Let me see.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    case = Case("harmony", "harmony", raw, [("text", "", "Let me see.\n\nDone.")])
    for chunks in ([raw], list(raw)):
        assert pieces(read(case.parser(eager), chunks)) == case.pieces
