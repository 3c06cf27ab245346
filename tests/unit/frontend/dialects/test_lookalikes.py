"""Outputs that resemble calls: parsers repair them or emit them as text."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.frontend.dialects.outputs import Piece, complete_calls, now, pieces, read, text, thinking

from kvmesh.frontend.conversation import Tool, ToolCallEnd, ToolCallStart
from kvmesh.frontend.dialects.families import CHANNELS, TOOL_PARSERS
from kvmesh.frontend.dialects.output import OutputParser, choose_grammar
from kvmesh.frontend.dialects.preview import merge_deltas


def parser(
    tool: str, reasoning: str = "none", calls: bool = True, eager: bool = True
) -> OutputParser:
    grammar = choose_grammar("", tool_parser=tool, reasoning_parser=reasoning)
    return grammar.parser([], calls=calls, eager=eager)


def whole(tool: str, raw: str, reasoning: str = "none") -> list[Piece]:
    """The pieces of a complete output, on which eager and lazy parsing must agree."""
    found = pieces(read(parser(tool, reasoning, eager=False), raw))
    assert pieces(read(parser(tool, reasoning, eager=False), [raw])) == found
    return found


@pytest.mark.parametrize(
    ("tool", "raw"),
    [
        ("hermes", "Write <tool_call> and </tool_call> around it."),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>\n[1, 2]\n</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argument": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "args": "{\\"a\\": 1}"}</tool_call>'),
        ("hermes", "a < b and <tool_cal"),
        ("qwen3_coder", "Use <function=name> to call, <tool_call> first."),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n"),
        ("llama3_json", '{"city": "Rome"}'),
        ("llama3_json", '[1, 2, {"name": 3}]'),
        ("llama3_json", '{"name": "Rome", "size": 3}'),
        ("llama3_json", "{ not json }"),
        ("pythonic", "[see](http://x.y) for more"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[note(this is no call)]"),
        ("pythonic", "[f(a=1"),
        ("mistral", "The marker [TOOL_CALLS] begins calls."),
        ("mistral", "[TOOL_CALLS]get_weather and so on"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>hello<｜tool▁calls▁end｜>"),
        ("deepseek_v3_1", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>no json<｜tool▁call▁end｜>"),
        ("deepseek_v3_2", "<｜DSML｜function_calls>\n<｜DSML｜invoke name=>\n"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("glm45", "<tool_call>is a tag</tool_call>"),
        ("minimax_m2", "<minimax:tool_call>text</minimax:tool_call>"),
        ("gemma4", "<|tool_call>call:f(a=1)<tool_call|>"),
        ("phi4", "Use functools.partial, or functools[0]."),
        ("granite", "<|tool_call|>none today"),
        ("step3", "<｜tool_calls_begin｜>?<｜tool_calls_end｜>"),
        ("harmony", "plain text with a <| in it"),
    ],
)
def test_text_that_resembles_a_call_is_text(tool: str, raw: str) -> None:
    assert whole(tool, raw) == [text(raw)]


@pytest.mark.parametrize("tool", TOOL_PARSERS)
def test_without_calls_all_output_is_text(tool: str) -> None:
    raw = "".join(TOOL_PARSERS[tool].openers) + '{"name": "f", "arguments": {}}'
    assert pieces(read(parser(tool, calls=False), raw)) == [text(raw)]


def test_a_real_call_behind_a_false_one_is_found() -> None:
    raw = 'A <tool_call> is: <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert whole("hermes", raw) == [text("A <tool_call> is:"), now()]
    broken = '<tool_call>\n{"name": "f", "arguments[: {}}\n</tool_call>'
    raw = f'{broken}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
    assert whole("hermes", raw) == [text(broken), now()]
    raw = '<tool_call>{"name": "now"}</tool_call><tool_call>what?</tool_call> Hm.'
    assert whole("hermes", raw) == [now(), text("<tool_call>what?</tool_call> Hm.")]


def test_text_behind_calls_is_emitted() -> None:
    assert whole("mistral", "[TOOL_CALLS]now{} And then?") == [now(), text("And then?")]
    assert whole("llama3_json", '{"name": "now", "parameters": {}} ok; {') == [
        now(),
        text("ok; {"),
    ]


def test_an_id_without_an_end_does_not_swallow_its_call() -> None:
    one = "<|tool_call:begin|>call_{}<|tool_call:name|>now<|tool_call:args|>{{}}<|tool_call:end|>"
    raw = f"<|tool_calls|>{one.format(0).replace(':name', '', 1)}{one.format(1)}<|calls|>"
    grammar = choose_grammar("", tool_parser="solar_open", reasoning_parser="solar_open")
    found = pieces(read(grammar.parser([], eager=False), f"<|begin|>assistant{raw}"))
    assert all(name in found[0][2] for name in ("call_0", "now"))


@pytest.mark.parametrize(
    ("tool", "start", "rest"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, ', 'x "b": 2}}</tool_call>'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n",
            "<parameter=b c>\n2\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_a_call_that_breaks_off_leaves_the_rest_as_text(tool: str, start: str, rest: str) -> None:
    events = read(parser(tool), start + rest)
    assert not complete_calls(events)
    assert merge_deltas(events)[-1] == text(rest)
    assert merge_deltas(read(parser(tool), [start + rest])) == merge_deltas(events)


def call(**arguments: object) -> Piece:
    return ("call", "f", arguments)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": "say "hi" now"}', {"a": 'say "hi" now'}),
        ('{"a": "ends in "quotes""}', {"a": 'ends in "quotes"'}),
        ('{"a": "x", "b": "one, "two", three"}', {"a": "x", "b": 'one, "two", three'}),
        ('{"a": "line\nline\tend"}', {"a": "line\nline\tend"}),
        ('{"a": "\\d+\\."}', {"a": "\\d+\\."}),
        ('{"a": "\\u00e9\\uZZZZ"}', {"a": "é\\uZZZZ"}),
        ('{"a": True, "b": None, "c": False}', {"a": True, "b": None, "c": False}),
        ('{"a": [1, 2,], }', {"a": [1, 2]}),
        ('{"a": {"b": [1', None),
        ('{"a": -1.5e+3, "b": 12345678901234567890}', {"a": -1500.0, "b": 12345678901234567890}),
        ('{"a": 01}', None),
        ('{"a": NaN}', None),
        ('{"a": "😀\\ud83d\\ude00"}', {"a": "😀😀"}),
    ],
)
def test_mistakes_in_json_are_repaired(written: str, meant: dict[str, object] | None) -> None:
    raw = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    assert whole("hermes", raw) == ([call(**meant)] if meant else [text(raw)])


def test_missing_braces_are_added_at_the_end_marker() -> None:
    raw = '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "c"\n</tool_call> Hm.'
    assert whole("hermes", raw) == [call(a=[1, {"b": "c"}]), text("Hm.")]
    raw = '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'
    assert whole("hermes", raw) == [call(a=1)]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(arguments=st.dictionaries(st.text(), JSON, max_size=4), ascii_only=st.booleans())
def test_valid_json_keeps_its_value(arguments: dict[str, object], ascii_only: bool) -> None:
    for written in (
        json.dumps(arguments, ensure_ascii=ascii_only),
        json.dumps(arguments, indent=2),
        json.dumps(arguments, separators=(",", ":")),
    ):
        raw = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
        found = pieces(read(parser("hermes"), raw))
        assert found == [call(**arguments)] or found == [("call", "f", arguments)]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("f(a='it\\'s', b=\"x\\\"y\")", {"a": "it's", "b": 'x"y'}),
        (
            "f(a='''two\nlines''', b=(1, 2), c={'d': None})",
            {"a": "two\nlines", "b": [1, 2], "c": {"d": None}},
        ),
        ("f(a='\\x41\\u00e9\\n')", {"a": "Aé\n"}),
        ("f( a = [ ] , )", {"a": []}),
        ("f(a='')", {"a": ""}),
        ("f(a='two\nlines', b=\"x\ny\")", {"a": "two\nlines", "b": "x\ny"}),
        ('f(a=\'it\'s\', b="say "hi" now")', {"a": "it's", "b": 'say "hi" now'}),
        ("f(a='print('x', 'y')\nf('x')\n')", {"a": "print('x', 'y')\nf('x')\n"}),
        ("f(a='d = {'k': 'v', 'l': 'w'}', b=1)", {"a": "d = {'k': 'v', 'l': 'w'}", "b": 1}),
        (
            "f(a=['x', 'it's', ('y',)], b={'k': 'v's', 'l': {}})",
            {"a": ["x", "it's", ["y"]], "b": {"k": "v's", "l": {}}},
        ),
    ],
)
def test_python_literals_become_json(written: str, meant: dict[str, object]) -> None:
    assert whole("pythonic", f"[{written}]") == [call(**meant)]


def test_valid_python_keeps_its_value() -> None:
    strings = ["", "'", '"', "a, b='c'", "x)", "x)]", "\\n\n", "[f(a='b')]", "é'\"", "\t\r"]
    for value in [*strings, strings, dict.fromkeys(strings, "'"), [[True, None, 1.5], {"k": []}]]:
        other = call(a=value, b="x")
        raw = f"[f(a={value!r}, b='x'), f( b = 'x' , a = {value!r} ), now()]"
        assert whole("pythonic", raw) == [other, other, now()]
        raw = f"<|tool_call_start|>[f(a={value!r}, b='x')]<|tool_call_end|> Hm."
        assert whole("lfm2", raw) == [other, text("Hm.")]


def test_values_between_tags_are_typed_by_the_schema() -> None:
    kinds = {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": ["number", "null"]},
        "b": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
        "o": {"$ref": "#/$defs/thing"},
        "e": {"enum": ["1", "2"]},
    }
    schema = {"properties": kinds, "$defs": {"thing": {"type": "object"}}}
    shown = {"s": "42", "i": "42", "n": "None", "b": "True", "o": "{'k': 1}", "e": "1", "u": "7"}
    raw = "".join(f"<parameter={k}>{v}</parameter>" for k, v in shown.items())
    grammar = choose_grammar("", tool_parser="qwen3_coder")
    found = pieces(read(grammar.parser([Tool("f", "", schema)]), f"<function=f>{raw}</function>"))
    expected = {"s": "42", "i": 42, "n": None, "b": True, "o": {"k": 1}, "e": "1", "u": 7}
    assert found == [call(**expected)]


def test_a_value_that_does_not_match_its_type_stays_text() -> None:
    schema = {"properties": {"i": {"type": "integer"}}}
    raw = "<function=f><parameter=i>many</parameter></function>"
    events = read(
        choose_grammar("", tool_parser="qwen3_coder").parser([Tool("f", "", schema)]), raw
    )
    assert pieces(events) == [call(i="many")]


def test_custom_tools_get_text_and_namespaced_tools_their_name() -> None:
    tools = [Tool("patch", "", {}, custom=True), Tool("read", "", {}, namespace="fs")]
    raw = (
        '<tool_call>{"name": "patch", "arguments": {"input": "*** \\"x\\"\\n"}}</tool_call>'
        '<tool_call>{"name": "fs__read", "arguments": {"p": 1}}</tool_call>'
    )
    events = read(choose_grammar("", tool_parser="hermes").parser(tools, new_id=lambda: "id"), raw)
    assert [e for e in events if isinstance(e, ToolCallStart)] == [
        ToolCallStart("id", "patch", custom=True),
        ToolCallStart("id", "read", "fs"),
    ]
    assert "".join(getattr(e, "arguments", "") for e in events) == '*** "x"\n{"p": 1}'


def test_an_eager_call_that_breaks_off_has_no_end() -> None:
    raw = '<tool_call>{"name": "f", "arguments": {"a": "b'
    events = read(parser("hermes", eager=True), [raw])
    assert isinstance(events[0], ToolCallStart)
    assert not any(isinstance(event, ToolCallEnd) for event in events)
    raw = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'
    events = read(parser("hermes", eager=True), [raw])
    assert complete_calls(events) == 0
    assert "oops}}</tool_call>" in "".join(getattr(event, "text", "") for event in events)


def test_thinking_begins_only_at_the_start_of_the_output() -> None:
    assert whole("none", "The <think> tag", "basic") == [text("The <think> tag")]
    assert whole("none", " \n<think>a</think>\n\nb", "basic") == [thinking("a"), text("b")]
    raw = '<think>a</think><tool_call>{"name": "now"}</tool_call><think>b</think>c'
    assert whole("hermes", raw, "basic") == [thinking("a"), now(), thinking("b"), text("c")]
    assert whole("none", "<think>never closed", "basic") == [thinking("never closed")]


@pytest.mark.parametrize(
    "raw", [" " * 5000, "x" + "\n" * 5000, " " * 3000 + "x" + " " * 3000 + "y"]
)
def test_long_white_space_is_text(raw: str) -> None:
    assert whole("hermes", raw, "basic") == [text(raw)]


@pytest.mark.parametrize(
    ("prompt", "reasoning", "expected"),
    [
        ("...<think>\n", "basic", [thinking("a"), text("b")]),
        ("...", "deepseek_r1", [thinking("a"), text("b")]),
        ("...<think>\n\n</think>\n\n", "deepseek_r1", [text("a</think>b")]),
        ("...", "basic", [text("a</think>b")]),
    ],
)
def test_the_end_of_the_prompt_shows_whether_thinking_has_begun(
    prompt: str, reasoning: str, expected: list[Piece]
) -> None:
    grammar = choose_grammar("", reasoning_parser=reasoning)
    assert pieces(read(grammar.parser([], prompt), "a</think>b")) == expected


def test_only_possible_markers_are_held_back() -> None:
    fed = parser("hermes", "basic")
    shown = [
        "".join(getattr(e, "text", "") for e in fed.feed(c)) for c in ["Hel", "lo <", "b> ", "x"]
    ]
    assert shown == ["Hel", "lo", " <b>", " x"]


SOUP = ['{"name": "f", "arguments": {', '"a": "', *'"}][()', "f(a=", *" \nx:,1", "</think>"]


@pytest.mark.parametrize("tool", [*TOOL_PARSERS, *CHANNELS, "harmony"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_sequence_of_markers_breaks_a_parser(tool: str, data: st.DataObject) -> None:
    """No exception, no dependence on the chunks, valid arguments."""
    bits = st.sampled_from([*_markers(tool), *SOUP])
    raw = "".join(data.draw(st.lists(bits, max_size=14)))
    cut = data.draw(st.integers(0, len(raw)))
    found = whole(tool, raw, "basic")
    assert pieces(read(parser(tool, "basic", eager=False), [raw[:cut], raw[cut:]])) == found
    if not any(kind == "call" for kind, _, _ in found) and tool in TOOL_PARSERS:
        shown = "".join(content for _, _, content in found)
        assert _solid(tool, shown) == _solid(tool, raw) or "think>" in raw
    read(parser(tool, "basic", eager=True), raw)


def _markers(tool: str) -> list[str]:
    if tool == "harmony":
        return [
            "<|channel|>analysis",
            "<|message|>",
            "<|start|>assistant",
            "<|call|>",
            " to=functions.f",
        ]
    if tool in CHANNELS:
        channels = CHANNELS[tool]
        return [*channels.start, *channels.mark, *channels.end, "to=self", "to=f"]
    grammar = TOOL_PARSERS[tool]
    frame = grammar.frame
    return [*grammar.openers, *grammar.end, *frame.open, *frame.close, "<think>"]


def _solid(tool: str, raw: str) -> str:
    """The text without white space and without the marks around it."""
    frame = TOOL_PARSERS[tool].frame
    for mark in (*frame.open, *frame.close):
        raw = raw.replace(mark, "")
    return re.sub(r"\s", "", raw)
