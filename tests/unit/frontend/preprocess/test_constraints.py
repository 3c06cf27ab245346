"""Constraints of `tool_choice`, strict tools and schemas; the parsing of what engines write."""

import json
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from kvmesh.bus.messages import Guided, ModelCard, Sampling
from kvmesh.frontend.conversation import (
    AnswerEvent,
    GenerateRequest,
    Message,
    TextDelta,
    Tool,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolChoice,
)
from kvmesh.frontend.dialects.output import OutputGrammar
from kvmesh.frontend.dialects.preview import merge_deltas
from kvmesh.frontend.dialects.structural_tags import CALL_TAGS
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.preprocess.output_form import OutputForm, output_form

READ = Tool("read", "", {"type": "object", "properties": {"path": {"type": "string"}}})
LIST = Tool("list", "", {})
PATCH = Tool("patch", "", {}, custom=True, grammar="start: /.+/")
STRICT = Tool("book", "", {"type": "object", "required": ["day"]}, namespace="trip", strict=True)
NODE = {"$defs": {"N": {"properties": {"next": {"$ref": "#/$defs/N"}}}}, "$ref": "#/$defs/N"}
SCHEMA = Guided(kind="json_schema", value='{"type":"object"}')
REQUIRED = ToolChoice("required")


def form(
    choice: ToolChoice,
    *tools: Tool,
    parser: str | None = "hermes",
    reasoning: str | None = None,
    prompt: str = "",
    tags: bool = True,
    parallel: bool = True,
    text: Guided | None = None,
) -> OutputForm:
    request = GenerateRequest(
        id="r",
        model="m",
        sampling=Sampling(max_tokens=9),
        messages=[Message("user", [])],
        tools=list(tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        guided=text,
    )
    card = ModelCard(name="m", context=9, block_size=1, files="", structural_tags=tags)
    dialect = SimpleNamespace(grammar=OutputGrammar(parser, reasoning))
    model: Any = SimpleNamespace(card=card, dialect=dialect)
    return output_form(request, model).after(prompt, None)


def named(*names: str, mode: Literal["auto", "required"] = "required") -> ToolChoice:
    return ToolChoice(mode, names)


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def constraint(made: OutputForm) -> Guided:
    guided = made.constraint()
    assert guided is not None
    return guided


def read(made: OutputForm, text: str, size: int = 1000) -> list[tuple[str, str, str]]:
    """(kind, tool, content) of every piece of an output that arrives in parts of `size`."""
    parser = made.parser(eager=True)
    events: list[AnswerEvent] = []
    for at in range(0, len(text), size):
        events += parser.feed(text[at : at + size])
    return merge_deltas(events + parser.finish())


def test_auto_and_none_require_no_call() -> None:
    for choice in (ToolChoice(), ToolChoice("none"), named("read", mode="auto")):
        assert form(choice, READ).calls != "required"
        assert form(choice, READ).constraint() is None


@pytest.mark.parametrize(
    ("choice", "tools", "reason"),
    [
        (named("x"), [READ], "`x`"),
        (named("read", "x", mode="auto"), [READ], "`x`"),
        (named(), [READ], "allows no tool"),
        (REQUIRED, [], "has no tools"),
    ],
)
def test_a_choice_that_no_tool_fits_is_rejected(
    choice: ToolChoice, tools: list[Tool], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as error:
        form(choice, *tools)
    assert error.value.param == "tool_choice"


def test_one_tool_is_constrained_by_its_schema() -> None:
    guided = constraint(form(named("read"), READ, LIST))
    assert guided.kind == "json_schema"
    assert json.loads(guided.value) == READ.parameters
    custom = constraint(form(named("patch"), PATCH))
    assert (custom.kind, custom.value) == ("grammar", "start: /.+/")
    pattern = Tool("date", "", {}, custom=True, grammar="[0-9]+", regex=True)
    dated = constraint(form(named("date"), pattern))
    assert (dated.kind, dated.value) == ("regex", "[0-9]+")


def test_several_tools_are_constrained_by_a_list_of_calls() -> None:
    schema = json.loads(constraint(form(REQUIRED, READ, LIST)).value)
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    names = [entry["properties"]["name"]["enum"] for entry in schema["items"]["anyOf"]]
    assert names == [["read"], ["list"]]
    some = json.loads(constraint(form(named("read", "patch"), READ, LIST, PATCH)).value)
    assert len(some["items"]["anyOf"]) == 2
    single = constraint(form(REQUIRED, READ, LIST, parallel=False))
    assert json.loads(single.value)["maxItems"] == 1


def test_parameters_take_their_definitions_along() -> None:
    tools = [Tool("plan", "", NODE), Tool("again", "", NODE)]
    schema = json.loads(constraint(form(REQUIRED, *tools)).value)
    for place, entry in enumerate(schema["items"]["anyOf"]):
        assert entry["properties"]["parameters"] == {"$ref": f"#/$defs/{place}"}
        definition = schema["$defs"][str(place)]
        assert definition["$ref"] == f"#/$defs/{place}/$defs/N"
        following = definition["$defs"]["N"]["properties"]["next"]
        assert following == {"$ref": f"#/$defs/{place}/$defs/N"}


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"items": [{"type": "null"}]}, {"items": True, "prefixItems": [{"type": "null"}]}),
        ({"type": "object", "properties": None}, {"type": "object"}),
        ({"$id": "a", "items": {"$ref": "a"}}, {"items": {"$ref": "#"}}),
    ],
)
def test_the_schema_of_a_text_is_written_as_engines_read_it(schema: Any, written: Any) -> None:
    text = Guided(kind="json_schema", value=compact(schema))
    assert constraint(form(ToolChoice(), text=text)).value == compact(written)
    assert compact(written) in constraint(form(ToolChoice(), READ, text=text)).value


def test_the_constraint_of_the_same_tools_is_made_once() -> None:
    made = constraint(form(REQUIRED, READ, LIST))
    assert constraint(form(REQUIRED, READ, LIST)) is made
    others = [form(REQUIRED, LIST, READ), form(REQUIRED, READ, LIST, parallel=False)]
    assert all(constraint(other) != made for other in others)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_arguments_are_emitted_as_they_arrive(size: int) -> None:
    made = form(named("read"), READ)
    assert read(made, '\n{"path": "a}b"}', size) == [("call", "read", '{"path": "a}b"}')]
    parser = made.parser(eager=True)
    parser.feed('{"pa')
    assert parser.feed('th": "<tool_call>') == [ToolCallDelta('th": "<tool_call>')]


def test_a_named_call_that_breaks_off_is_text_or_has_no_end() -> None:
    """As the calls in a model's own syntax: a client must not take the arguments for whole."""
    made, cut = form(named("read"), READ), '{"path": "a'
    for eager, text, kinds in (
        (False, cut, [TextDelta]),
        (False, cut + '"}', [ToolCallStart, ToolCallDelta, ToolCallEnd]),
        (True, cut, [ToolCallStart, ToolCallDelta]),
        (True, cut + '"}', [ToolCallStart, ToolCallDelta, ToolCallEnd]),
    ):
        parser = made.parser(eager=eager)
        assert [type(event) for event in [*parser.feed(text), *parser.finish()]] == kinds


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_a_list_of_calls_is_read_call_by_call(size: int, key: str) -> None:
    text = f'[{{"name": "read", "{key}": {{"path": "}}{{"}}}},\n {{"name": "list", "{key}": {{}}}}]'
    calls = [("call", "read", '{"path":"}{"}'), ("call", "list", "{}")]
    assert read(form(REQUIRED, READ, LIST), text, size) == calls


OWN = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("tools", [(READ,), (READ, LIST)])
@pytest.mark.parametrize("before", ["", " ", "I look.\n", "Hm.</think>\n\n", "Hm.\n"])
def test_an_engine_without_guided_decoding_may_call_in_the_models_syntax(
    tools: tuple[Tool, ...], size: int, before: str
) -> None:
    thinks = before.startswith("Hm")
    made = form(REQUIRED, *tools, reasoning="qwen3", prompt="<think>\n" if thinks else "")
    head = [("thinking", "", "Hm.")] if thinks else [("text", "", before.strip())]
    found = read(made, f"{before}{OWN}", size)
    assert [piece for piece in found if piece[2].strip()] == [
        *(piece for piece in head if piece[2]),
        ("call", "read", '{"path": "a"}'),
    ]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("text", ["I cannot.", "[", " [1]"])
def test_an_answer_without_a_call_is_text(text: str, size: int) -> None:
    assert read(form(REQUIRED, READ, LIST), text, size) == [("text", "", text)]


def test_an_incomplete_call_is_text() -> None:
    parser = form(REQUIRED, READ, LIST).parser(eager=True)
    events = [*parser.feed('[{"name": "re'), *parser.finish()]
    assert events == [TextDelta('{"name": "re')]


@pytest.mark.parametrize("size", [1, 1000])
def test_calls_of_other_tools_than_the_allowed_ones_are_dropped(size: int) -> None:
    other = OWN.replace("read", "list")
    text = f"One.\n{other}\nTwo.\n{OWN}"
    for choice in (named("read"), named("read", mode="auto")):
        found = read(form(choice, READ, LIST), text, size)
        assert [name for kind, name, _ in found if kind == "call"] == ["read"]
        shown = "".join(content for kind, _, content in found if kind == "text")
        assert shown.startswith("One.")
        assert "Two." in shown
        assert "tool_call" not in shown
    found = read(form(ToolChoice("none"), READ, LIST), text, size)
    assert found == [("text", "", "One.\nTwo.")]


@pytest.mark.parametrize("eager", [False, True])
def test_a_call_that_breaks_off_is_no_text_where_none_is_allowed(eager: bool) -> None:
    for end in range(OWN.index(">") + 1, OWN.index("</") + 1):
        parser = form(ToolChoice("none"), READ, LIST).parser(eager)
        events = [*parser.feed(f"One.\n{OWN[:end]}"), *parser.finish()]
        assert merge_deltas(events) == [("text", "", "One.")]
    for text in ("One. {", "One.\n<", "<b>", '{"name": "read"'):
        parser = form(ToolChoice("none"), READ, LIST).parser(eager)
        assert merge_deltas([*parser.feed(text), *parser.finish()]) == [("text", "", text)]


def test_markup_is_text_without_tools() -> None:
    assert read(form(ToolChoice("none")), OWN) == [("text", "", OWN)]


# --- optional calls ---


def tag(parser: str | None, *tools: Tool, choice: ToolChoice | None = None) -> Any:
    guided = form(choice or ToolChoice(), *tools, parser=parser).constraint()
    assert guided is None or guided.kind == "structural_tag"
    return guided and json.loads(guided.value)


def test_only_strict_tools_constrain_the_choice_auto() -> None:
    assert tag("hermes", READ, LIST, PATCH) is None
    assert tag("hermes", STRICT, choice=ToolChoice("none")) is None
    for parser in ("qwen3_coder", "pythonic", "harmony", "mistral", None):
        assert tag(parser, STRICT) is None


def test_each_tool_has_its_tag() -> None:
    made = tag("hermes", READ, STRICT)
    assert made["type"] == "structural_tag"
    assert made["format"]["triggers"] == ["<tool_call>"]
    read, book = made["format"]["tags"]
    assert read["begin"] == '<tool_call>\n{"name": "read", "arguments": '
    assert read["content"]["json_schema"] == {"type": "object"}
    assert book["begin"] == '<tool_call>\n{"name": "trip__book", "arguments": '
    assert book["content"]["json_schema"] == STRICT.parameters
    assert book["end"] == "}\n</tool_call>"


def test_only_allowed_tools_have_a_tag() -> None:
    for parser in ("hermes", "qwen3_coder", "glm45", "minimax_m2", "kimi_k2"):
        made = tag(parser, READ, LIST, STRICT, choice=named("list", "trip__book", mode="auto"))
        assert ["read" in each["begin"] for each in made["format"]["tags"]] == [False, False]


def written(node: Any) -> str:
    """A text that the tag permits."""
    match node["type"]:
        case "tag":
            return f"{node['begin']}{written(node['content'])}{node['end']}"
        case "sequence":
            return "".join(map(written, node["elements"]))
        case "json_schema":
            return '{"day": 1}'
        case "regex":
            return "0"
    return str(node["value"])


@pytest.mark.parametrize(
    "parser", sorted(n for n, t in CALL_TAGS.items() if t.trigger and t.argument is None)
)
def test_the_parser_reads_output_that_a_tag_permits(parser: str) -> None:
    made = tag(parser, STRICT, READ)["format"]
    for each, name in zip(made["tags"], ("book", "read"), strict=True):
        assert each["begin"].startswith(made["triggers"][0])
        events = OutputGrammar(parser).parser([STRICT, READ]).feed(f"I look.\n{written(each)}")
        assert [e.name for e in events if isinstance(e, ToolCallStart)] == [name]
        arguments = "".join(e.arguments for e in events if isinstance(e, ToolCallDelta))
        assert json.loads(arguments) == {"day": 1}
        assert any(isinstance(e, ToolCallEnd) for e in events)


# --- a schema for the text, and thinking ---


def test_a_schema_leaves_tools_callable() -> None:
    either = json.loads(constraint(form(ToolChoice(), READ, text=SCHEMA)).value)["format"]
    calls, text = either["elements"]
    assert either["type"] == "or"
    assert "read" in calls["tags"][0]["begin"]
    assert text["json_schema"] == {"type": "object"}
    plain = form(ToolChoice(), READ, text=SCHEMA, tags=False)
    wrapped, text = json.loads(constraint(plain).value)["anyOf"]
    assert wrapped["required"] == ["tool_calls"]
    assert plain.rewrites_calls
    output = '{"tool_calls": [{"name": "read", "parameters": {"path": "a"}}]}'
    assert read(plain, output, 1) == [("call", "read", '{"path":"a"}')]
    for choice in (ToolChoice("none"), named(mode="auto")):
        assert constraint(form(choice, READ, text=SCHEMA)) == SCHEMA


@pytest.mark.parametrize("size", [1, 1000])
def test_markup_inside_a_constrained_text_stays(size: int) -> None:
    text = json.dumps({"text": OWN})
    assert read(form(ToolChoice(), READ, text=SCHEMA), text, size) == [("text", "", text)]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("answer", ['{"a": 1}', "{}", '{ "a": "</think>"}'])
def test_an_answer_after_open_thinking_is_found_with_and_without_it(
    answer: str, tags: bool, size: int
) -> None:
    made = form(ToolChoice(), reasoning="deepseek_r1", prompt="<think>\n", tags=tags, text=SCHEMA)
    assert made.constraint() != SCHEMA if tags else made.constraint() == SCHEMA
    assert read(made, answer, size) == [("text", "", answer)]
    thought = [("thinking", "", "Hm {}."), ("text", "", answer)]
    assert read(made, f"Hm {{}}.\n</think>\n\n{answer}", size) == thought


@pytest.mark.parametrize("size", [1, 1000])
def test_a_text_that_may_be_thinking_waits_for_its_end(size: int) -> None:
    """The engine follows the constraint at once, so what it writes is the answer."""
    made = form(named("patch"), PATCH, READ, reasoning="deepseek_r1", prompt="<think>", tags=False)
    assert read(made, "*** Begin", size) == [("call", "patch", "*** Begin")]
    thought = [("thinking", "", "Hm."), ("call", "patch", "*** Begin")]
    assert read(made, "Hm.</think>*** Begin", size) == thought
    scalar = Guided(kind="json_schema", value='{"type":"integer"}')
    number = form(ToolChoice(), reasoning="step3", prompt="<think>", tags=False, text=scalar)
    assert read(number, "42", size) == [("text", "", "42")]
    assert read(number, "Hm.</think>42", size) == [("thinking", "", "Hm."), ("text", "", "42")]


def test_thinking_that_the_request_forbids_is_not_allowed() -> None:
    made = form(ToolChoice(), reasoning="qwen3", text=SCHEMA)
    assert constraint(made).kind == "structural_tag"
    assert made.after("", False).constraint() == SCHEMA
    assert made.after("<think>\n\n</think>\n\n", None).constraint() == SCHEMA


CHOICE = Guided(kind="choice", value='["yes","no"]')
REGEX = Guided(kind="regex", value="[a-z]+")
GRAMMAR = Guided(kind="grammar", value="start: /.+/")


@pytest.mark.parametrize("text", [CHOICE, REGEX, GRAMMAR])
def test_a_text_that_is_no_json_is_constrained_as_it_is(text: Guided) -> None:
    made = form(ToolChoice("none"), READ, text=text)
    assert made.constraint() == text
    assert read(made, "yes", 1) == [("text", "", "yes")]


def test_thinking_comes_before_a_choice_and_before_no_grammar() -> None:
    made = form(ToolChoice(), text=CHOICE, reasoning="qwen3", prompt="<think>\n")
    assert constraint(made).kind == "structural_tag"
    assert '"const_string","value":"yes"' in constraint(made).value
    assert read(made, "so</think>\n\nno", 1) == [("thinking", "", "so"), ("text", "", "no")]
    assert form(ToolChoice(), text=GRAMMAR, reasoning="qwen3", prompt="<think>\n").constraint() == (
        GRAMMAR
    )


def test_a_choice_beside_tools_needs_structural_tags() -> None:
    made = form(ToolChoice(), READ, text=CHOICE)
    assert '"const_string","value":"yes"' in constraint(made).value
    assert read(made, "yes", 1) == [("text", "", "yes")]
    for refused in (
        form(ToolChoice(), READ, text=CHOICE, tags=False),
        form(ToolChoice(), READ, text=GRAMMAR),
    ):
        with pytest.raises(InvalidRequest) as error:
            refused.constraint()
        assert error.value.param == "tool_choice"
