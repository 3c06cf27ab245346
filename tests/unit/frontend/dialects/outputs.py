"""Raw outputs in each family's published format, and their pieces."""

import json
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from kvmesh.frontend.conversation import AnswerEvent, Tool, ToolCallEnd
from kvmesh.frontend.dialects.output import OutputGrammar, OutputParser, choose_grammar
from kvmesh.frontend.dialects.preview import merge_deltas

Piece = tuple[str, str, Any]

TOOLS = [
    Tool(
        "get_weather",
        "Weather.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"type": "object"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    ),
    Tool(
        "write",
        "Write.",
        {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        },
    ),
    Tool("now", "Time.", {"type": "object", "properties": {}}),
]
WEATHER = {"city": "Zürich", "days": 3, "exact": True, "tags": ["a", "b"], "where": {"x": -1.5}}
CODE = {"path": "a/b.py", "content": "def f():\n    return \"<b>&\\n\" + 'x'\n"}
PART = 16
THOUGHT, SAID = "I need\n\nthe weather.", "Let me see."


class Case(NamedTuple):
    """A raw output; parsers `tool` and `reasoning` must split it into `pieces`."""

    tool: str | None
    reasoning: str | None
    raw: str
    pieces: list[Piece]

    @property
    def title(self) -> str:
        return f"{self.tool}-{self.reasoning}-{len(self.raw)}"

    @property
    def parser_names(self) -> tuple[str | None, str | None]:
        grammar = chosen(self.tool, self.reasoning)
        return grammar.tool_parser, grammar.reasoning_parser

    def parser(self, eager: bool) -> OutputParser:
        grammar = chosen(self.tool, self.reasoning)
        return grammar.parser(TOOLS, eager=eager, new_id=lambda: "id")


@cache
def chosen(tool: str | None, reasoning: str | None) -> OutputGrammar:
    return choose_grammar("", tool_parser=tool or "none", reasoning_parser=reasoning or "none")


def thinking(text: str = THOUGHT) -> Piece:
    return ("thinking", "", text)


def text(text: str = SAID) -> Piece:
    return ("text", "", text)


def weather() -> Piece:
    return ("call", "get_weather", WEATHER)


def write() -> Piece:
    return ("call", "write", CODE)


def now() -> Piece:
    return ("call", "now", {})


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def read(parser: OutputParser, chunks: Iterable[str]) -> list[AnswerEvent]:
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return events + parser.finish()


def parts(text: str) -> list[str]:
    """The text in parts of PART characters, but for the first: a longer text has other cuts."""
    first = len(text) % PART
    return [text[:first], *(text[at : at + PART] for at in range(first, len(text), PART))]


def pieces(events: list[AnswerEvent]) -> list[Piece]:
    """The pieces of an output, with the arguments of calls decoded from JSON."""
    return [
        (kind, name, json.loads(content) if kind == "call" else content)
        for kind, name, content in merge_deltas(events)
    ]


def complete_calls(events: list[AnswerEvent]) -> int:
    return sum(isinstance(event, ToolCallEnd) for event in events)


W, C = dump(WEATHER), dump(CODE)


def _tagged_weather(tag: str, pad: str = "") -> str:
    """The arguments of WEATHER, one tag each; `tag` is formatted with name and value."""
    values = {k: v if isinstance(v, str) else dump(v) for k, v in WEATHER.items()}
    return "\n".join(tag.format(k, f"{pad}{v}{pad}") for k, v in values.items())


def _tagged_code(tag: str, pad: str = "") -> str:
    return "\n".join(tag.format(k, f"{pad}{v}{pad}") for k, v in CODE.items())


_QWEN = "<parameter={}>{}</parameter>"
_MINIMAX = '<parameter name="{}">{}</parameter>'
_STEP = '<steptml:parameter name="{}">{}</steptml:parameter>'
_GLM = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>"


def _dsml() -> str:
    return "\n".join(
        f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">'
        f"{v if isinstance(v, str) else dump(v)}</｜DSML｜parameter>"
        for k, v in WEATHER.items()
    )


_PY_WEATHER = "get_weather(city='Zürich', days=3, exact=True, tags=[\"a\", 'b'], where={'x': -1.5})"
_PY_CODE = "write(path='a/b.py', content='def f():\\n    return \"<b>&\\\\n\" + \\'x\\'\\n')"

CASES = [
    Case(
        "hermes",
        "qwen3",
        f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {W}}}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "write", "arguments": {C}}}\n</tool_call>',
        [thinking(), text(), weather(), write()],
    ),
    Case(
        "hermes",
        None,
        f'<tool_call>{{"arguments": {W}, "name": "get_weather"}}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call>\nDone.',
        [weather(), now(), text("Done.")],
    ),
    Case(
        "hermes",
        None,
        f"<tool_call>{dump({'name': 'write', 'arguments': C})}</tool_call>",
        [write()],
    ),
    Case(
        "hermes",
        "qwen3",
        f'<think>\n{THOUGHT}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
        [thinking(), now()],
    ),
    Case(
        "qwen3_coder",
        None,
        f"{SAID}\n<tool_call>\n<function=get_weather>\n{_tagged_weather(_QWEN, chr(10))}\n"
        f"</function>\n</tool_call>\n<tool_call>\n<function=write>\n"
        f"{_tagged_code(_QWEN, chr(10))}\n</function>\n</tool_call>",
        [text(), weather(), write()],
    ),
    Case(
        "qwen3_coder",
        None,
        "<function=write><parameter=path>x</parameter><parameter=content>\n"
        "<parameter=y>\n1\n</parameter>\n</parameter></function><function=now></function>",
        [
            ("call", "write", {"path": "x", "content": "<parameter=y>\n1\n</parameter>"}),
            now(),
        ],
    ),
    Case(
        "seed_oss",
        "seed_oss",
        f"<seed:think>{THOUGHT}</seed:think>\n{SAID}\n<seed:tool_call>\n<function=write>\n"
        f"{_tagged_code(_QWEN)}\n</function>\n</seed:tool_call>",
        [thinking(), text(), write()],
    ),
    Case("llama3_json", None, f'{{"name": "get_weather", "parameters": {W}}}', [weather()]),
    Case(
        "llama3_json",
        None,
        f'<|python_tag|>{{"name": "get_weather", "parameters": {W}}}; '
        f'{{"type": "function", "name": "write", "parameters": {C}}}',
        [weather(), write()],
    ),
    Case(
        "functionary",
        None,
        f"{SAID}\n<function=get_weather>{W}</function><function=now>{{}}</function>",
        [text(), weather(), now()],
    ),
    Case("pythonic", None, f"[{_PY_WEATHER}, {_PY_CODE}, now()]", [weather(), write(), now()]),
    Case("pythonic", None, f"<|python_start|>[{_PY_CODE}]<|python_end|>", [write()]),
    Case(
        "mistral",
        "mistral",
        f"[THINK]{THOUGHT}[/THINK]{SAID}[TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]"
        f"write[CALL_ID]abcdefghi[ARGS]{C}",
        [thinking(), text(), weather(), write()],
    ),
    Case(
        "mistral",
        None,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {W}, "id": "abcdefghi"}}, '
        f'{{"name": "write", "arguments": {C}}}]',
        [weather(), write()],
    ),
    Case(
        "deepseek_v3",
        "deepseek_r1",
        f"{THOUGHT}\n</think>\n\n{SAID}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        f"<｜tool▁sep｜>get_weather\n```json\n{W}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>"
        f"function<｜tool▁sep｜>write\n```json\n{C}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [thinking(), text(), weather(), write()],
    ),
    Case(
        "deepseek_v3_1",
        "basic",
        f"{SAID}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{W}"
        f"<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        [text(), weather(), now()],
    ),
    Case(
        "deepseek_v3_2",
        "basic",
        f"<think>{THOUGHT}</think>{SAID}\n\n<｜DSML｜function_calls>\n"
        f'<｜DSML｜invoke name="get_weather">\n{_dsml()}\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [thinking(), text(), weather(), now()],
    ),
    Case(
        "deepseek_v4",
        "basic",
        f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n{_dsml()}\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        [weather()],
    ),
    Case(
        "kimi_k2",
        "kimi_k25",
        f"<think>{THOUGHT}</think>{SAID}<|tool_calls_section_begin|><|tool_call_begin|>"
        f"functions.get_weather:0<|tool_call_argument_begin|>{W}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.write:1<|tool_call_argument_begin|>{C}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [thinking(), text(), weather(), write()],
    ),
    Case(
        "glm45",
        "glm45",
        f"<think>{THOUGHT}</think>\n{SAID}\n<tool_call>get_weather\n{_tagged_weather(_GLM)}\n"
        "</tool_call>\n<tool_call>now\n</tool_call>",
        [thinking(), text(), weather(), now()],
    ),
    Case(
        "glm47",
        "glm47",
        "<tool_call>write<arg_key>path</arg_key><arg_value>a/b.py</arg_value><arg_key>content"
        f"</arg_key><arg_value>{CODE['content']}</arg_value></tool_call>",
        [write()],
    ),
    Case(
        "minimax_m2",
        "minimax_m2",
        f"{THOUGHT}\n</think>\n\n{SAID}\n<minimax:tool_call>\n"
        f'<invoke name="get_weather">\n{_tagged_weather(_MINIMAX)}\n</invoke>\n'
        f'<invoke name="write">\n{_tagged_code(_MINIMAX)}\n</invoke>\n</minimax:tool_call>',
        [thinking(), text(), weather(), write()],
    ),
    Case(
        "nemotron_deci",
        "nemotron_deci",
        f'<think>\n{THOUGHT}\n</think>\n\n<TOOLCALL>[{{"name": "get_weather", "arguments": {W}}}, '
        '{"name": "now", "arguments": {}}]</TOOLCALL>',
        [thinking(), weather(), now()],
    ),
    Case(
        "nemotron_nano",
        "nemotron_nano",
        f"{THOUGHT}\n</think>\n<tool_call>\n<function=write>\n{_tagged_code(_QWEN, chr(10))}\n"
        "</function>\n</tool_call>",
        [thinking(), write()],
    ),
    Case(
        "gemma4",
        "gemma4",
        f"<|channel>thought\n{THOUGHT}\n<channel|>{SAID}<|tool_call>call:get_weather{{"
        'city:<|"|>Zürich<|"|>,days:3,exact:true,tags:[<|"|>a<|"|>,<|"|>b<|"|>],where:{x:-1.5}}'
        "<tool_call|><|tool_call>call:now{}<tool_call|>",
        [thinking(), text(), weather(), now()],
    ),
    Case(
        "functiongemma",
        None,
        "<start_function_call>call:write{path:<escape>a/b.py<escape>,content:<escape>"
        f"{CODE['content']}<escape>}}<end_function_call>",
        [write()],
    ),
    Case("gemma3", None, f"{SAID}\n```tool_code\n{_PY_CODE}\n```", [text(), write()]),
    Case(
        "phi4",
        "phi4",
        f'functools[{{"name": "get_weather", "arguments": {W}}}, '
        f'{{"name": "write", "arguments": {C}}}]',
        [weather(), write()],
    ),
    Case(
        "phi4_mini",
        None,
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {W}}}]<|/tool_call|>',
        [weather()],
    ),
    Case(
        "granite",
        "granite",
        f"Here is my thought process:\n{THOUGHT}\n\nHere is my response:\n{SAID}"
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {W}}}]',
        [thinking(), text(), weather()],
    ),
    Case(
        "step3",
        "step3",
        f"{THOUGHT}\n</think>\n{SAID}<｜tool_calls_begin｜><｜tool_call_begin｜>function"
        f'<｜tool_sep｜><steptml:invoke name="get_weather">{_tagged_weather(_STEP)}'
        "</steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        f'<steptml:invoke name="write">{_tagged_code(_STEP)}</steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>",
        [thinking(), text(), weather(), write()],
    ),
    Case(
        "jamba",
        None,
        f'<tool_calls>[{{"name": "get_weather", "arguments": {W}}}]</tool_calls>',
        [weather()],
    ),
    Case(
        "olmo3",
        None,
        f"<function_calls>\n{_PY_WEATHER}\nnow()\n</function_calls>",
        [weather(), now()],
    ),
    Case("lfm2", None, f"<|tool_call_start|>[{_PY_CODE}]<|tool_call_end|>", [write()]),
    Case(
        "harmony",
        "harmony",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary"
        f"<|message|>{SAID}<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{W}<|call|><|start|>assistant "
        f"to=functions.write<|channel|>commentary json<|message|>{C}<|call|>",
        [thinking(), text(), weather(), write()],
    ),
    Case(
        None,
        "kimi",
        f"◁think▷{THOUGHT}◁/think▷{SAID}",
        [thinking(), text()],
    ),
    Case(None, "basic", f"<think>{THOUGHT}</think>{SAID}", [thinking(), text()]),
    Case(None, None, "<think>a</think> <tool_call>\n", [text("<think>a</think> <tool_call>\n")]),
]
