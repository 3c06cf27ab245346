"""Real chat templates write a turn, and the parsers that are chosen for them read it.

The templates come out of published packages; without a package index, the tests are skipped.
"""

import json
import random
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from support.real_templates import real_templates
from unit.frontend.dialects.outputs import Piece, pieces, read
from unit.frontend.dialects.recorded import CONFIG, TODAY, request, user

from kvmesh.frontend.conversation import (
    Block,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.dialects import ChatTemplate, OutputGrammar, TemplateError, choose_grammar
from kvmesh.frontend.dialects.output import OutputParser
from kvmesh.frontend.dialects.templates.written_calls import generated_from

SPLITS = 20
_TEXT, _RESULT = {"type": "string"}, "result of the call"
TOOLS = [
    Tool(
        "write_file",
        "Writes.",
        {"type": "object", "properties": {"path": _TEXT, "content": _TEXT}},
    ),
    Tool(
        "search",
        "Searches.",
        {
            "type": "object",
            "properties": {
                "query": {"type": "object"},
                "limit": {"type": "integer"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": _TEXT},
            },
        },
    ),
    Tool("now", "Tells the time.", {"type": "object", "properties": {}}),
]
CODE = (
    'def f(a):\n    """Say <b>"hi"</b> & \'bye\'."""\n    return {a: [f"{a}", "</p>", \'<i>\']}\n'
)
QUERY = {"all": [{"k": "a, b", "v": 1.5}, {"k": "é'", "v": None}], "none": {}}


def call(name: str, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(f"c{number}", name, json.dumps(arguments, ensure_ascii=False))


TURNS: dict[str, list[Block]] = {
    "text and a call": [Text("I look."), call("write_file", path="a.txt", content="x y")],
    "two calls": [call("write_file", path="a.txt", content="x"), call("now", 1)],
    "no arguments": [call("now")],
    "code": [call("write_file", path="a.py", content=CODE)],
    "nested": [call("search", query=QUERY, limit=3, exact=True, tags=["x", 'y "z"'])],
    "unicode": [call("write_file", path="Zürich/日本.txt", content="né 😀 “q” \u00a0x")],
    "thinking": [Thinking("I must\n\nknow <it>."), call("write_file", path="a.txt", content="x")],
    "thinking and text": [Thinking("Hm."), Text("Good.")],
}

# Tokens that end a turn, as models' `generation_config.json` lists them.
_ENDS = re.compile(
    r"<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|</?s>|<eos>|<\|end_of_text\|>|<｜end▁of▁sentence｜>"
    r"|<\|observation\|>|<\|user\|>|<turn\|>|\[e~\[|<seed:eos>|<\|END_OF_TURN_TOKEN\|>|<\|eot\|>"
    r"|<SPECIAL_12>|<end_of_turn>|<\|return\|>|<\|call\|>|<\|calls\|>|<\|eom\|>|<\|endoftext\|>"
    r"|<\|assistant_end\|>|<\|end\|>(?!<\|(start|begin)\|>assistant)|<\|end_of_msg\|>|<\|eos\|>"
    r"|<｜hy_eos:opensource｜>|<\|message_sep\|>\n\n(?:function result|user)|<\|tool_response>"
    r"|<eod>|(?<=<\|tools_suffix\|>)\["
    r"|<end_of_sentence>|<\|role_end\|>|</assistant>|<sep>"
)

# Turns that cannot be read, with the reason.
_UNQUOTED, _AS_TEXT = "it writes texts without quotes", "it writes each value as a text"
_ANYWHERE = "it writes calls without a marker behind text"
_HEADER = "it shows other messages differently once a turn follows"
UNREAD = {
    ("llama-cpp-python/MiniMax-M3", "nested"): "it leaves out null and what an empty object is",
    ("llama-cpp-python/openai-gpt-oss-120b", "text and a call"): "it writes text as analysis",
    ("vllm/tool_chat_template_deepseekv31", None): _HEADER,
    ("vllm/tool_chat_template_mistral_parallel", "thinking and text"): _HEADER,
    ("vllm/tool_chat_template_gemma3_pythonic", None): "it writes no commas",
    ("vllm/tool_chat_template_llama3.2_pythonic", None): _UNQUOTED,
    ("vllm/tool_chat_template_toolace", None): _UNQUOTED,
    ("vllm/tool_chat_template_llama4_json", "text and a call"): _ANYWHERE,
    ("vllm/tool_chat_template_llama4_pythonic", "text and a call"): _ANYWHERE,
    ("vllm/tool_chat_template_llama4_pythonic", "nested"): _AS_TEXT,
}


@cache
def loaded(name: str) -> tuple[ChatTemplate, OutputGrammar] | None:
    """A template and its parsers; None if it shows no tools or no calls in a form of its own."""
    files = {"chat_template.jinja": real_templates()[name], "tokenizer_config.json": CONFIG}
    template = ChatTemplate(files)
    return (template, choose_grammar("", template)) if template.written_calls else None


def written(template: ChatTemplate, turn: list[Block]) -> tuple[list[str], str] | None:
    """Possible ends of the prompt, and the turn that the template writes."""
    calls = [block for block in turn if isinstance(block, ToolCall)]
    results: list[Block] = [ToolResult(each.id, [Text(_RESULT)]) for each in calls]
    back = Message("tool", results) if calls else user(_RESULT)

    def render(*messages: Message) -> str:
        asked: GenerateRequest = request(user("Hi there."), *messages, tools=TOOLS)
        return template.render(asked, TODAY)

    try:
        prompt, whole = render(), render(Message("assistant", turn), back)
    except TemplateError:
        return None
    start = generated_from(prompt, whole)
    rest = whole[start : whole.find(_RESULT, start)]
    end = _ENDS.search(rest)
    return [whole[:start], prompt], rest[: end.start()] if end else rest


def expected(turn: list[Block], output: str) -> list[Piece]:
    """The pieces of a turn that the template shows; some make several turns of it."""
    found: list[Piece] = []
    for block in turn:
        if isinstance(block, ToolCall) and block.name in output:
            found.append(("call", block.name, json.loads(block.arguments)))
        elif isinstance(block, Thinking | Text) and block.text in output:
            found.append(("thinking" if isinstance(block, Thinking) else "text", "", block.text))
    return found


def parts(raw: str, seed: int) -> list[str]:
    chance = random.Random(seed)
    cuts = sorted(chance.choices(range(len(raw) + 1), k=chance.randint(1, 16)))
    return [raw[a:b] for a, b in pairwise([0, *cuts, len(raw)])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    try:
        names = sorted(real_templates())
    except OSError:
        names = []
    metafunc.parametrize("name", names)


def stripped(found: list[Piece]) -> list[Piece]:
    """The pieces without white space around text, with which templates are lavish."""
    return [
        (kind, name, content.strip() if kind == "text" else content)
        for kind, name, content in found
    ]


def reader(
    grammar: OutputGrammar, prompts: list[str], output: str, meant: list[Piece]
) -> Callable[[bool], OutputParser]:
    """A maker of parsers for the turn, which may lack the thinking with which answers begin."""

    def maker(grammar: OutputGrammar, prompt: str) -> Callable[[bool], OutputParser]:
        return lambda eager: grammar.parser(TOOLS, prompt, eager=eager)

    grammars = (grammar, OutputGrammar(grammar.tool_parser))
    makers = [maker(each, prompt) for each in grammars for prompt in prompts]
    for make in makers:
        if stripped(pieces(read(make(False), [output]))) == meant:
            return make
    return makers[0]


def test_the_parsers_of_a_template_read_its_turns(name: str) -> None:
    found = loaded(name)
    if found is None:
        return
    template, grammar = found
    assert grammar.tool_parser is not None
    for kind, turn in TURNS.items():
        shown = written(template, turn)
        if shown is None or not UNREAD.keys().isdisjoint({(name, kind), (name, None)}):
            continue
        prompts, output = shown
        meant = expected(turn, output)
        make = reader(grammar, prompts, output, meant)
        assert stripped(pieces(read(make(False), [output]))) == meant, (kind, output)
        for seed in range(SPLITS):
            chunks = parts(output, seed)
            assert stripped(pieces(read(make(True), chunks))) == meant, (kind, output, chunks)
