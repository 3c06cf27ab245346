"""Calls with one tag per argument whose closing tags are missing, and values that mention tags."""

import random
from itertools import pairwise

import pytest
from unit.frontend.dialects.outputs import Piece, pieces, read, text

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects.output import choose_grammar

_TEXT = {"type": "string"}
TOOLS = [
    Tool("f", "", {"type": "object", "properties": {"a": _TEXT, "b": _TEXT, "n": {}}}),
    Tool("any", "", {"type": "object"}),
    Tool("g", "", {"type": "object", "properties": {}}),
]


def split(raw: str, seed: int) -> list[str]:
    """`raw` in pieces, cut at random places."""
    chance = random.Random(seed)
    cuts = sorted(chance.choices(range(len(raw) + 1), k=chance.randint(1, 12)))
    return [raw[a:b] for a, b in pairwise([0, *cuts, len(raw)])]


def parsed(tool: str, raw: str) -> list[Piece]:
    """The pieces of an output, which depend neither on its splits nor on `eager`."""
    grammar = choose_grammar("", tool_parser=tool, reasoning_parser="none")
    found = pieces(read(grammar.parser(TOOLS), [raw]))
    for chunks in ([raw], list(raw), *(split(raw, seed) for seed in range(20))):
        for eager in (True, False):
            assert pieces(read(grammar.parser(TOOLS, eager=eager), chunks)) == found, chunks
    return found


def call(name: str = "f", **arguments: object) -> Piece:
    return ("call", name, arguments)


def qwen(inner: str, end: str = "\n</function>\n</tool_call>") -> str:
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{inner}{end}"


def minimax(inner: str, end: str = "\n</invoke>\n</minimax:tool_call>") -> str:
    return f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{inner}{end}'


def dsml(inner: str) -> str:
    begin = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">'
    return f"<｜DSML｜tool_calls>\n{begin}{inner}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"


def glm45(inner: str, end: str = "\n</tool_call>") -> str:
    return f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{inner}{end}"


def glm47(inner: str) -> str:
    return f"<tool_call>f<arg_key>a</arg_key><arg_value>{inner}</tool_call>"


def step3(inner: str) -> str:
    begin = (
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">'
    )
    end = "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"
    return f'{begin}<steptml:parameter name="a">{inner}{end}'


G = "<function=g>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("tool", "raw", "calls"),
    [
        # the end of a value, before the next argument
        ("qwen3_coder", qwen("x\n<parameter=b>\ny\n</parameter>"), [call(a="x", b="y")]),
        ("qwen3_coder", qwen("x\ny\n\n<parameter=b>\ny\n</parameter>"), [call(a="x\ny\n", b="y")]),
        ("qwen3_coder", qwen("\n<parameter=b>\n</parameter>"), [call(a="", b="")]),
        ("qwen3_coder", qwen("x\n<parameter=n>\n3\n<parameter=b>\ny"), [call(a="x", n=3, b="y")]),
        (
            "qwen3_coder",
            "<function=f><parameter=a>x<parameter=b>y</parameter></function>",
            [call(a="x", b="y")],
        ),
        (
            "qwen3_coder",
            "<function=any>\n<parameter=p>\n1\n<parameter=q>\n2\n</parameter>\n</function>",
            [call("any", p=1, q=2)],
        ),
        ("minimax_m2", minimax('x\n<parameter name="b">y</parameter>'), [call(a="x", b="y")]),
        (
            "deepseek_v3_2",
            dsml('x\n<｜DSML｜parameter name="n" string="false">[1]</｜DSML｜parameter>'),
            [call(a="x", n=[1])],
        ),
        (
            "step3",
            step3('x<steptml:parameter name="b">y</steptml:parameter>'),
            [call(a="x", b="y")],
        ),
        (
            "step3",
            step3('x\n<steptml:parameter name="b">y</steptml:parameter>'),
            [call(a="x", b="y")],
        ),
        ("glm45", glm45("x\n<arg_key>b</arg_key>\n<arg_value>y</arg_value>"), [call(a="x", b="y")]),
        ("glm45", glm47("x<arg_key>b</arg_key><arg_value>y</arg_value>"), [call(a="x", b="y")]),
        # the end of a name
        (
            "glm45",
            glm45("x</arg_value>\n<arg_key>b\n<arg_value>y</arg_value>"),
            [call(a="x", b="y")],
        ),
        ("glm45", glm45("x\n<arg_key>b<arg_value>y</arg_value>"), [call(a="x", b="y")]),
        # the end of the last value
        ("qwen3_coder", qwen("x"), [call(a="x")]),
        ("qwen3_coder", qwen("x", "\n</tool_call>"), [call(a="x")]),
        ("qwen3_coder", qwen("x", "\n</function>"), [call(a="x")]),
        ("qwen3_coder", qwen("x", f"\n</function>\n{G}"), [call(a="x"), call("g")]),
        ("qwen3_coder", qwen("x", f"\n</tool_call>\n<tool_call>\n{G}"), [call(a="x"), call("g")]),
        ("minimax_m2", minimax("x"), [call(a="x")]),
        ("deepseek_v3_2", dsml("x"), [call(a="x")]),
        ("step3", step3("x"), [call(a="x")]),
        ("glm45", glm45("x"), [call(a="x")]),
        ("glm45", glm47("x"), [call(a="x")]),
        (
            "glm45",
            glm45("x", "\n</tool_call>\n<tool_call>g\n</tool_call>"),
            [call(a="x"), call("g")],
        ),
        # the end of a call
        ("qwen3_coder", qwen("x\n</parameter>", "\n</tool_call>"), [call(a="x")]),
        ("qwen3_coder", qwen("x\n</parameter>", f"\n{G}"), [call(a="x"), call("g")]),
        ("qwen3_coder", qwen("x\n</parameter>", f"\n<tool_call>\n{G}"), [call(a="x"), call("g")]),
        ("minimax_m2", minimax("x</parameter>", "\n</minimax:tool_call>"), [call(a="x")]),
        (
            "minimax_m2",
            minimax("x</parameter>", '\n<invoke name="g">\n</invoke>\n</minimax:tool_call>'),
            [call(a="x"), call("g")],
        ),
        ("glm45", glm45("x</arg_value>", "\n<tool_call>g\n</tool_call>"), [call(a="x"), call("g")]),
    ],
)
def test_a_missing_tag_ends_at_the_next_one(tool: str, raw: str, calls: list[Piece]) -> None:
    assert parsed(tool, raw) == calls


MENTIONS = [
    "grep '{key}' x",  # on a line of its own, only a tag at the start of a line ends a value
    "one\n  {key}\n",
    "{close}",
    "one\n{close} two",
    "one\n{close}\ntwo",
    "one\n{end}\ntwo",
    "one\n{own}\ntwo",  # the argument that is being read
    "one\n{unknown}\ntwo",  # no argument of the tool
    "one\n{broken}\ntwo",
]


@pytest.mark.parametrize("written", MENTIONS)
@pytest.mark.parametrize(
    ("tool", "write", "tags"),
    [
        (
            "qwen3_coder",
            lambda value: qwen(f"{value}\n</parameter>"),
            ("<parameter=%s>", "</function>", "</tool_call>"),
        ),
        (
            "minimax_m2",
            lambda value: minimax(f"{value}</parameter>"),
            ('<parameter name="%s">', "</invoke>", "</minimax:tool_call>"),
        ),
        (
            "deepseek_v3_2",
            lambda value: dsml(f"{value}</｜DSML｜parameter>"),
            (
                '<｜DSML｜parameter name="%s" string="true">',
                "</｜DSML｜invoke>",
                "</｜DSML｜tool_calls>",
            ),
        ),
        (
            "glm45",
            lambda value: glm45(f"{value}</arg_value>"),
            ("<arg_key>%s</arg_key>\n<arg_value>", "</tool_call>", "</tool_call>"),
        ),
    ],
)
def test_a_value_may_mention_tags(
    tool: str, write: object, tags: tuple[str, str, str], written: str
) -> None:
    assert callable(write)
    key, close, end = tags
    value = written.format(
        key=key % "b",
        own=key % "a",
        unknown=key % "c",
        broken=(key % "b")[:-1],
        close=close,
        end=end,
    )
    assert parsed(tool, write(value)) == [call(a=value)]


def test_a_value_without_any_end_is_no_call() -> None:
    raw = qwen("x\n<parameter=b>\ny", "")
    grammar = choose_grammar("", tool_parser="qwen3_coder", reasoning_parser="none")
    assert pieces(read(grammar.parser(TOOLS, eager=False), [raw])) == [text(raw)]


def test_what_a_broken_call_shows_does_not_depend_on_the_splits() -> None:
    raw = qwen("x\n</parameter> and\n<parameter=b> no", "")
    grammar = choose_grammar("", tool_parser="qwen3_coder", reasoning_parser="none")
    shown = {
        "".join(getattr(event, "arguments", "") for event in read(grammar.parser(TOOLS), chunks))
        for chunks in ([raw], list(raw), *(split(raw, seed) for seed in range(20)))
    }
    assert len(shown) == 1


NS = "]<]minimax[>["


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (f"x{NS}<b>y{NS}</b>{NS}</invoke>\n", [call(a="x", b="y")]),
        (f"x{NS}<b>y{NS}</invoke>\n", [call(a="x", b="y")]),
        (f"x{NS}<n>1{NS}</invoke>\n", [call(a="x", n=1)]),
        (f"x{NS}</invoke>\n", [call(a="x")]),
        (f"x{NS}</a>\n", [call(a="x")]),
        (f"x{NS}", [call(a=f"x{NS}")]),
        # text that mentions tags
        (f"{NS}<c>x{NS}</c>{NS}</a>{NS}</invoke>\n", [call(a=f"{NS}<c>x{NS}</c>")]),
        (f"{NS}</invoke> x{NS}</a>{NS}</invoke>\n", [call(a=f"{NS}</invoke> x")]),
        # members of an object
        (f"x{NS}</a>{NS}<n>{NS}<k>1{NS}</n>{NS}</invoke>\n", [call(a="x", n={"k": 1})]),
    ],
)
def test_an_element_s_missing_end(inner: str, expected: list[Piece]) -> None:
    raw = f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<a>{inner}{NS}</tool_call>'
    if inner == f"x{NS}":
        raw = raw.removesuffix(f"{NS}</tool_call>") + f"{NS}</a>{NS}</invoke>"
    assert parsed("minimax_m3", raw) == expected


def test_a_call_of_elements_ends_at_the_next_call() -> None:
    first = f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<a>x{NS}</a>\n'
    assert parsed("minimax_m3", f'{first}{NS}<invoke name="g">{NS}</invoke>') == [
        call(a="x"),
        call("g"),
    ]
