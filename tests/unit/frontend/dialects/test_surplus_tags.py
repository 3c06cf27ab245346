"""Calls with more tags than they need, and tags where they end nothing."""

import json

import pytest
from unit.frontend.dialects.outputs import Piece, pieces, read, text, thinking
from unit.frontend.dialects.test_missing_tags import TOOLS, call, parsed, split

from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.dialects.output import choose_grammar

QWEN = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{}</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
DSML = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">{}'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
K3 = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" '
    'type="string"<|sep|>{}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)
HERMES = '<tool_call>\n{{"name": "f", "arguments": {{"a": "{}"}}}}\n</tool_call>'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{{"a": "{}"}}<|tool_call_end|><|tool_calls_section_end|>'
)
M3 = ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<a>{}]<]minimax[>[</a>'
M3 += "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
FORMS = {
    "qwen3_coder": (QWEN, ("</parameter>", "</function>", "</tool_call>"), "<tool_call>"),
    "minimax_m2": (MINIMAX, ("</parameter>", "</invoke>", "</minimax:tool_call>"), ""),
    "glm45": (GLM, ("</arg_key>", "</arg_value>", "</tool_call>"), "<tool_call>"),
    "deepseek_v3_2": (DSML, ("</｜DSML｜parameter>", "</｜DSML｜invoke>"), "<｜DSML｜tool_calls>"),
    "kimi_k3": (K3, ("<|close|>argument<|sep|>", "<|close|>tools<|sep|>"), "<|open|>tools<|sep|>"),
    "minimax_m3": (M3, ("]<]minimax[>[</tool_call>",), "]<]minimax[>[<tool_call>"),
    "hermes": (HERMES, ("</tool_call>",), "<tool_call>"),
    "kimi_k2": (KIMI, ("<|tool_call_end|>", "<|tool_calls_section_end|>"), ""),
}
forms = pytest.mark.parametrize(("tool", "form"), FORMS.items(), ids=FORMS)


@forms
def test_tags_may_be_doubled(tool: str, form: tuple[str, tuple[str, ...], str]) -> None:
    raw, ends, begin = form[0].format("x"), form[1], form[2]
    assert parsed(tool, raw) == [call(a="x")]
    for end in ends:
        assert parsed(tool, raw.replace(end, end + end)) == [call(a="x")], end
        doubled = raw.replace(end, f"{end}\n{end}")
        assert parsed(tool, f"{doubled}\nDone.") == [call(a="x"), text("Done.")], end
    if begin:
        assert parsed(tool, raw.replace(begin, f"{begin}\n{begin}", 1)) == [call(a="x")]
    assert parsed(tool, raw + raw) == [call(a="x"), call(a="x")]


@pytest.mark.parametrize(
    ("tool", "raw", "begin"),
    [
        ("kimi_k2", KIMI, "<|tool_call_begin|>"),
        ("functionary", '<function=f>{{"a": "{}"}}</function>', "<function="),
        ("qwen3_coder", QWEN, "<function="),
        ("deepseek_v3_2", DSML, "<｜DSML｜invoke name="),
    ],
)
def test_the_tag_that_begins_a_call_may_be_doubled(tool: str, raw: str, begin: str) -> None:
    for doubled in (begin + begin, f"{begin}\n{begin}"):
        assert parsed(tool, raw.format("x").replace(begin, doubled)) == [call(a="x")], doubled


def test_line_breaks_around_a_value_may_be_those_of_windows() -> None:
    assert parsed("qwen3_coder", QWEN.format("x").replace("\n", "\r\n")) == [call(a="x")]
    lines = QWEN.format("x\ny\n").replace("\n", "\r\n")
    assert parsed("qwen3_coder", lines) == [call(a="x\r\ny\r\n")]
    assert parsed("qwen3_coder", QWEN.format("x\r\n")) == [call(a="x\r\n")]
    assert parsed("k2_horizon", '<ifm|tool_call>\r\n{"name": "g", "arguments": {}}') == [call("g")]


@pytest.mark.parametrize("gap", ["", "\n", "\r\n  "])
def test_white_space_around_cdata_is_not_part_of_the_value(gap: str) -> None:
    value = "x\n]]> y</param>"
    raw = f'<function name="f"><param name="a">{gap}<![CDATA[{value}]]>{gap}</param></function>'
    assert parsed("minicpm5", raw) == [call(a=value)]


@forms
def test_an_end_that_breaks_off_is_no_text(
    tool: str, form: tuple[str, tuple[str, ...], str]
) -> None:
    raw = form[0].format("x")
    for cut in range(len(raw) - 4, len(raw)):
        grammar = choose_grammar("", tool_parser=tool, reasoning_parser="none")
        for chunks in ([raw[:cut]], list(raw[:cut])):
            found = pieces(read(grammar.parser(TOOLS, eager=False), chunks))
            # this end is the only one of GLM's calls
            assert found == ([text(raw[:cut])] if tool == "glm45" else [call(a="x")]), raw[:cut]


@pytest.mark.parametrize(
    ("tool", "raw"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x"}}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x"}}]</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": {"a": "x"}}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "x"}}'),
        ("kimi_k2", KIMI.format("x").replace('"x"}', '"x"}}')),
        ("qwen3_coder", '<tool_call>\n<function=f>\n{"a": "x"}\n</function>\n</tool_call>'),
    ],
)
def test_a_bracket_too_many_is_no_text(tool: str, raw: str) -> None:
    assert parsed(tool, raw) == [call(a="x")]


def test_a_bracket_before_text_is_text() -> None:
    raw = '{"name": "f", "parameters": {"a": "x"}} } and'
    assert parsed("llama3_json", raw) == [call(a="x"), text("} and")]


def test_each_list_of_calls_may_have_its_marker() -> None:
    raw = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x"}}]'
    assert parsed("mistral", raw + raw) == [call(a="x"), call(a="x")]


@pytest.mark.parametrize("around", ["{}", "```\n{0}\n{0}\n```\n"])
@forms
def test_a_value_may_contain_whole_calls(
    tool: str, form: tuple[str, tuple[str, ...], str], around: str
) -> None:
    value = around.format(form[0].format("y"))
    inner = json.dumps(value, ensure_ascii=False)[1:-1] if tool in ("hermes", "kimi_k2") else value
    assert parsed(tool, form[0].format(inner)) == [call(a=value)]


def test_a_mention_before_a_call_is_text() -> None:
    raw = f"Calls begin with <tool_call> here.\n{GLM.format('x')}"
    assert parsed("glm45", raw) == [text("Calls begin with <tool_call> here."), call(a="x")]


def thought(raw: str, reasoning: str = "qwen3", tool: str = "hermes") -> list[Piece]:
    grammar = choose_grammar("", tool_parser=tool, reasoning_parser=reasoning)
    found = pieces(read(grammar.parser(TOOLS), [raw]))
    for chunks in (list(raw), *(split(raw, seed) for seed in range(20))):
        for eager in (True, False):
            assert pieces(read(grammar.parser(TOOLS, eager=eager), chunks)) == found, chunks
    return found


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        # a mention of a call does not end thinking
        ("<think>Use <tool_call> now.</think>Hi.", [thinking("Use <tool_call> now."), text("Hi.")]),
        (
            "<think>A <tool_call>{} is none.</think>Hi.",
            [thinking("A <tool_call>{} is none."), text("Hi.")],
        ),
        # thinking that goes on behind a call
        (
            f"<think>A {HERMES.format('x')} b</think>Hi.",
            [thinking("A"), call(a="x"), text("b\n\nHi.")],
        ),
        (f"<think>A {HERMES.format('x')}</think>", [thinking("A"), call(a="x")]),
        # the end of thinking that nothing has begun
        ("</think>\n\nHi.", [text("Hi.")]),
        ("<think>a</think></think>Hi.", [thinking("a"), text("Hi.")]),
        ("Hi </think> there.", [text("Hi </think> there.")]),
    ],
)
def test_the_end_of_thinking(raw: str, expected: list[Piece]) -> None:
    assert thought(raw) == expected


@pytest.mark.parametrize(
    ("tool", "reasoning", "raw"),
    [
        ("gemma4", "gemma4", '<|channel>A<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'),
        ("gemma4", "gemma4", '<|channel>thought\nA<|tool_call>:f{a:<|"|>x<|"|>}<tool_call|>'),
        ("deepseek_v3_2", "deepseek_v4", f"<think>A\n{DSML.format('x')}"),
        ("qwen3_coder", "nemotron_nano", f"A\n{QWEN.format('x')}"),
        ("mistral", "mistral", '[THINK]A[TOOL_CALLS]f[ARGS]{"a": "x"}'),
    ],
)
def test_a_call_ends_thinking(tool: str, reasoning: str, raw: str) -> None:
    assert thought(raw, reasoning, tool) == [thinking("A"), call(a="x")]


TYPED = [
    Tool(
        "t",
        "",
        {
            "type": "object",
            "properties": {
                "n": {"type": "integer"},
                "s": {"type": "string"},
                "u": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                "o": {"type": "object"},
            },
        },
    )
]


@pytest.mark.parametrize(
    ("key", "is_string", "raw", "value"),
    [
        ("n", "true", "42", 42),
        ("n", "true", "many", "many"),
        ("s", "false", "null", "null"),
        ("u", "true", "42", "42"),
        ("u", "false", "42", 42),
        ("x", "true", "42", "42"),
        ("x", "false", "42", 42),
        ("o", "false", '{"a": "x\ny"}', {"a": "x\ny"}),
    ],
)
def test_the_schema_types_a_value_before_its_tag(
    key: str, is_string: str, raw: str, value: object
) -> None:
    tag = f'<｜DSML｜parameter name="{key}" string="{is_string}">{raw}</｜DSML｜parameter>'
    output = (
        f'<｜DSML｜tool_calls><｜DSML｜invoke name="t">{tag}</｜DSML｜invoke></｜DSML｜tool_calls>'
    )
    grammar = choose_grammar("", tool_parser="deepseek_v3_2", reasoning_parser="none")
    found = pieces(read(grammar.parser(TYPED), output))
    assert found == [("call", "t", {key: value})]


@pytest.mark.parametrize("wrapper", ["arguments", "input", "properties"])
def test_all_arguments_may_come_as_one(wrapper: str) -> None:
    written = QWEN.replace("=a>", f"={wrapper}>")
    assert parsed("qwen3_coder", written.format('{"a": "x", "b": "y"}')) == [call(a="x", b="y")]
    assert parsed("qwen3_coder", written.format("{}")) == [call()]
    for other, value in (('{"c": 1}', {"c": 1}), ("x", "x")):
        meant = ("call", "f", {wrapper: value})
        assert parsed("qwen3_coder", written.format(other)) == [meant]


def test_an_object_with_only_a_name_is_an_answer() -> None:
    assert parsed("llama3_json", '{"name": "Ann"}') == [text('{"name": "Ann"}')]
    assert parsed("llama3_json", '{"name": "g"}') == [call("g")]


def test_names_may_be_escaped() -> None:
    raw = K3.replace('key="a"', 'key="q&amp;&quot;"').replace('tool="f"', 'tool="p<r"')
    assert parsed("kimi_k3", raw.format("x")) == [("call", "p<r", {'q&"': "x"})]


def test_a_message_may_follow_without_a_start() -> None:
    raw = (
        "<|content_thinking|>A<|end_message|>f<|content_invoke_tool_json|>"
        '{"name": "f", "args": {"a": "x"}}<|end_message|>'
    )
    assert thought(raw, "inkling", "inkling") == [thinking("A"), call(a="x")]
