"""Families by what their templates write: whole, cut anywhere at random, and broken off."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from unit.frontend.dialects.outputs import (
    TOOLS,
    Piece,
    chosen,
    complete_calls,
    pieces,
    read,
    text,
    thinking,
)
from unit.frontend.dialects.written import CALLS, FAMILIES, Family

SPLITS = 20
families = pytest.mark.parametrize("family", FAMILIES, ids=[f.title for f in FAMILIES])


def conversations(family: Family) -> Iterator[list[Piece]]:
    """Outputs of the family: thinking or none, text or none, calls or none."""
    thoughts: list[list[Piece]] = [[thinking()]] if family.reasoning else [[]]
    if family.reasoning and not family.starts_thinking:
        thoughts.append([])
    for thought in thoughts:
        for said in [[], [text("Let me see: \"<b>\" & 'it'.")]] if family.text else [[]]:
            for calls in [[], *CALLS]:
                parts = [*thought, *said, *[("call", name, args) for name, args in calls]]
                if parts:
                    yield parts


def chunks(raw: str, chance: random.Random) -> list[str]:
    cuts = sorted(chance.randrange(len(raw) + 1) for _ in range(chance.randint(1, 16)))
    return [raw[a:b] for a, b in pairwise([0, *cuts, len(raw)])]


@families
def test_a_family_is_read_as_its_template_writes_it(family: Family) -> None:
    chance = random.Random(family.title)
    for parts in conversations(family):
        raw = family.write(parts)
        for eager in (True, False):
            assert pieces(read(family.parser(eager), [raw])) == parts, raw
        for eager in (True, False) * (SPLITS // 2):
            cut = chunks(raw, chance)
            events = read(family.parser(eager), cut)
            assert pieces(events) == parts, cut
            assert complete_calls(events) == sum(kind == "call" for kind, _, _ in parts)
        assert pieces(read(family.parser(), raw)) == parts


@families
def test_a_broken_off_output_has_the_complete_calls(family: Family) -> None:
    """Every prefix gives the same pieces up to its end, streamed or not, and no other calls."""
    chance = random.Random(family.title)
    parts = list(conversations(family))[-1]
    raw, calls = family.write(parts), [part for part in parts if part[0] == "call"]
    for end in sorted(chance.sample(range(len(raw)), 60)):
        whole = pieces(read(family.parser(False), [raw[:end]]))
        assert pieces(read(family.parser(False), chunks(raw[:end], chance))) == whole
        found = [part for part in whole if part[0] == "call"]
        assert found == calls[: len(found)]
        assert complete_calls(read(family.parser(), chunks(raw[:end], chance))) == len(found)


@families
def test_text_behind_calls_is_text(family: Family) -> None:
    thoughts = [part for part in next(conversations(family)) if part[0] == "thinking"]
    parts = [*thoughts, ("call", "now", {})]
    raw = family.write(parts) + "\nDone."
    assert pieces(read(family.parser(), raw)) == [*parts, text("Done.")]


@families
def test_without_tools_no_text_is_lost(family: Family) -> None:
    parts = next(p for p in conversations(family) if p[-1][0] != "call" or not family.text)
    if family.text:
        assert pieces(read(family.parser(tools=False), family.write(parts))) == parts


@families
def test_plain_text_is_text(family: Family) -> None:
    if family.starts_thinking:
        return
    for raw in ("Hello, world.", "to be < or > not: <|", "Sure\nall right\n", '{"a": [1, "b"]}'):
        assert pieces(read(family.parser(), raw)) == [text(raw)]
        assert pieces(read(family.parser(), [raw])) == [text(raw)]


def test_a_header_may_follow_thinking_that_has_no_end() -> None:
    raw = (
        " to=self<|message|>I write to=x, then call. to=now<|message|><atem:function_calls>\n"
        '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls><|eot|>'
    )
    meant = [thinking("I write to=x, then call."), ("call", "now", {})]
    for cut in range(len(raw)):
        events = read(chosen("muse", "muse").parser(TOOLS), [raw[:cut], raw[cut:]])
        assert pieces(events) == meant
    often = "to=self<|message|>x " * 2000 + raw
    assert pieces(read(chosen("muse", "muse").parser(TOOLS), [often]))[-1] == meant[-1]
