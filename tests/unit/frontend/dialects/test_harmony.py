"""gpt-oss's messages: headers in all published forms, builtin tools, missing markers."""

import random
from itertools import pairwise

import pytest
from unit.frontend.dialects.outputs import Piece, pieces, read, text, thinking

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects.output import choose_grammar

GRAMMAR = choose_grammar("", tool_parser="harmony", reasoning_parser="harmony")
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
TOOLS = [
    Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}}),
    Tool("python", "", {"type": "object", "properties": {"code": {"type": "string"}}}),
    Tool("patch", "", {}, custom=True),
]
JSON = '<|message|>{"a": 1}'


def parsed(raw: str, prompt: str = PROMPT) -> list[Piece]:
    """The pieces of an output, which depend neither on its splits nor on `eager`."""
    found = pieces(read(GRAMMAR.parser(TOOLS, prompt), [raw]))
    for seed in range(20):
        chance = random.Random(seed)
        cuts = sorted(chance.choices(range(len(raw) + 1), k=chance.randint(1, 12)))
        chunks = [raw[a:b] for a, b in pairwise([0, *cuts, len(raw)])] if seed else list(raw)
        for eager in (True, False):
            assert pieces(read(GRAMMAR.parser(TOOLS, prompt, eager=eager), chunks)) == found, chunks
    return found


F = ("call", "f", {"a": 1})


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary json",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        " to=functions.f<|channel|>analysis<|constrain|>json",
        " to=functions.f <|constrain|>json<|channel|>commentary",
        " to=functions.f<|channel|>commentary",
        " to=functions.f json",
        " to=functions.f",
        " to=f<|channel|>commentary json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f",
        "<|channel|>analysis to=functions.f code",
        "<|channel|>commentary to=f json",
    ],
)
@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", ""])
def test_the_recipient_may_stand_behind_the_role_or_the_channel(header: str, end: str) -> None:
    assert parsed(f"{header}{JSON}{end}") == [F]
    assert parsed(f"{header}{JSON}{end}", "") == [F]
    assert parsed(f"<|start|>assistant{header}{JSON}{end}", "") == [F]
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    assert parsed(f"{thought}<|start|>assistant{header}{JSON}{end}") == [thinking("Hm."), F]
    assert parsed(f"{thought}assistant{header}{JSON}{end}") == [thinking("Hm."), F]
    twice = f"{header}{JSON}<|call|><|start|>assistant{header}{JSON}{end}"
    assert parsed(twice) == [F, F]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("<|channel|>final<|message|>Hi.<|return|>", [text("Hi.")]),
        ("<|channel|>commentary<|message|>I look.<|end|>", [text("I look.")]),
        ("<|message|>Hi.", [text("Hi.")]),
        ("Hi there.", [text("Hi there.")]),
        ("to be or not", [text("to be or not")]),
        (" to=x is what I mean", [text(" to=x is what I mean")]),
        ("assistants help", [text("assistants help")]),
        # messages that nothing ends
        (
            "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Hi.",
            [thinking("Hm."), text("Hi.")],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi.<|return|>",
            [thinking("Hm."), text("Hi.")],
        ),
        (
            f"<|channel|>commentary<|message|>I look.<|channel|>commentary to=functions.f{JSON}",
            [text("I look."), F],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistantfinal<|message|>Hi.",
            [thinking("Hm."), text("Hi.")],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistantanalysis<|message|>So.",
            [thinking("Hm.\n\nSo.")],
        ),
        (
            f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistantcommentary to=f{JSON}",
            [thinking("Hm."), F],
        ),
        ("<|channel|>final<|message|>The <|channel|> marker.", [text("The <|channel|> marker.")]),
        # tools that the request has, but not as functions in JSON
        (
            "<|channel|>analysis to=python code<|message|>print('a')\n<|call|>",
            [("call", "python", {"code": "print('a')\n"})],
        ),
        # no arguments
        ("<|channel|>commentary to=functions.f json<|message|><|call|>", [("call", "f", {})]),
        ("<|channel|>commentary to=functions.f<|message|> <|end|>", [("call", "f", {})]),
        # those that it lacks
        ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", [thinking("{}")]),
        (" to=browser.open<|channel|>analysis code<|message|>{}<|call|>", [thinking("{}")]),
        # other authors
        (
            "<|channel|>final<|message|>Hi.<|end|><|start|>functions.f to=assistant"
            "<|channel|>commentary<|message|>3<|end|><|start|>user<|message|>And?<|end|>",
            [text("Hi."), thinking("3\n\nAnd?")],
        ),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>none<|call|>",
            [text("none")],
        ),
    ],
)
def test_messages_by_channel_recipient_and_author(raw: str, expected: list[Piece]) -> None:
    assert parsed(raw) == expected


@pytest.mark.parametrize("raw", ["t", "to", " to=f", "assist", "assistant", "<|chan"])
def test_text_that_may_begin_a_header_is_not_lost(raw: str) -> None:
    assert parsed(raw) == [text(raw)]


def test_a_header_without_content_shows_what_is_no_header() -> None:
    assert parsed("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|cha") == [
        thinking("Hm.")
    ]
    raw = ' to=functions.f<|channel|>commentary json{"a": 1}'
    assert parsed(raw) == [text(raw)]


def test_a_free_text_tool_takes_the_whole_content() -> None:
    raw = "<|channel|>commentary to=functions.patch<|message|>*** x\n<|call|>"
    events = read(GRAMMAR.parser(TOOLS, PROMPT), [raw])
    assert "".join(getattr(event, "arguments", "") for event in events) == "*** x\n"


@pytest.mark.parametrize(
    ("begun", "raw", "expected"),
    [
        ("<|channel|>", "analysis<|message|>Hm.<|end|>", [thinking("Hm.")]),
        ("<|channel|>final", "<|message|>Hi.<|return|>", [text("Hi.")]),
        ("<|channel|>final<|message|>", "Hi.<|return|>", [text("Hi.")]),
        ("<|channel|>analysis<|message|>W", "ell.<|end|>", [thinking("ell.")]),
        (" to=functions.f<|channel|>commentary", f" json{JSON}<|call|>", [F]),
    ],
)
def test_the_prompt_may_end_within_a_message(begun: str, raw: str, expected: list[Piece]) -> None:
    assert parsed(raw, PROMPT + begun) == expected


def test_without_calls_their_content_is_text() -> None:
    raw = f"<|channel|>commentary to=functions.f json{JSON}<|call|>"
    parser = GRAMMAR.parser([], PROMPT, calls=False)
    assert pieces(read(parser, raw)) == [text('{"a": 1}')]
