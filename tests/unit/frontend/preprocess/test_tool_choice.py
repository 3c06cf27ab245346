"""Constraints of `tool_choice`, and the parsing of constrained output."""

import json
from typing import Any, Literal

import pytest

from kvmesh.bus.messages import Sampling
from kvmesh.frontend.conversation import (
    AnswerEvent,
    GenerateRequest,
    TextDelta,
    Tool,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolChoice,
)
from kvmesh.frontend.dialects.output import OutputGrammar
from kvmesh.frontend.dialects.structural_tags import CALL_TAGS
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.generation.output import PlainText
from kvmesh.frontend.preprocess.tool_choice import (
    RequiredToolCall,
    required_tool_call,
    strict_tool_tags,
)

READ = Tool("read", "", {"type": "object", "properties": {"path": {"type": "string"}}})
LIST = Tool("list", "", {})
PATCH = Tool("patch", "", {}, custom=True, grammar="start: /.+/")


def required(choice: ToolChoice, *tools: Tool, parallel: bool = True) -> RequiredToolCall | None:
    return required_tool_call(
        GenerateRequest(
            id="r",
            model="m",
            sampling=Sampling(max_tokens=9),
            tools=list(tools),
            tool_choice=choice,
            parallel_tool_calls=parallel,
        )
    )


def required_call(choice: ToolChoice, *tools: Tool) -> RequiredToolCall:
    constraint = required(choice, *tools)
    assert constraint is not None
    return constraint


def read(
    constraint: RequiredToolCall, text: str, size: int, rest: str = ""
) -> list[tuple[str, str]]:
    """(name, arguments) of every call in `text`, fed in pieces; `rest` is the text beside them."""
    own = OutputGrammar("hermes").parser([READ, LIST])
    parser, beside = constraint.parser(PlainText(), own), ""
    events: list[AnswerEvent] = []
    for at in range(0, len(text), size):
        events += parser.feed(text[at : at + size])
    events += parser.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallDelta):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
        elif isinstance(event, TextDelta):
            beside += event.text
        else:
            assert isinstance(event, ToolCallEnd)
    assert beside.strip() == rest.strip()
    return calls


def test_auto_and_none_require_no_call() -> None:
    assert required(ToolChoice(), READ) is None
    assert required(ToolChoice("none"), READ) is None


def test_a_choice_without_a_matching_tool_is_rejected() -> None:
    for choice, tools in ((ToolChoice("named", "x"), [READ]), (ToolChoice("required"), [])):
        with pytest.raises(InvalidRequest) as error:
            required(choice, *tools)
        assert error.value.param == "tool_choice"


def test_one_tool_is_constrained_by_its_schema() -> None:
    constraint = required_call(ToolChoice("named", "read"), READ, LIST)
    assert constraint.guided.kind == "json_schema"
    assert json.loads(constraint.guided.value) == READ.parameters
    custom = required_call(ToolChoice("named", "patch"), PATCH)
    assert (custom.guided.kind, custom.guided.value) == ("grammar", "start: /.+/")
    pattern = Tool("date", "", {}, custom=True, grammar="[0-9]+", regex=True)
    dated = required_call(ToolChoice("named", "date"), pattern)
    assert (dated.guided.kind, dated.guided.value) == ("regex", "[0-9]+")


def test_several_tools_are_constrained_by_a_list_of_calls() -> None:
    schema: Any = json.loads(required_call(ToolChoice("required"), READ, LIST).guided.value)
    assert schema["type"] == "array"
    assert schema["minItems"] == 1
    names = [entry["properties"]["name"]["enum"] for entry in schema["items"]["anyOf"]]
    assert names == [["read"], ["list"]]
    single = required(ToolChoice("required"), READ, LIST, parallel=False)
    assert single is not None
    assert json.loads(single.guided.value)["maxItems"] == 1


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_arguments_are_emitted_as_they_arrive(size: int) -> None:
    constraint = required_call(ToolChoice("named", "read"), READ)
    assert read(constraint, '\n{"path": "a}b"}', size) == [("read", '{"path": "a}b"}')]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_list_of_calls_is_read_call_by_call(size: int) -> None:
    text = '[{"name": "read", "parameters": {"path": "}{"}},\n {"name": "list", "parameters": {}}]'
    constraint = required_call(ToolChoice("required"), READ, LIST)
    assert read(constraint, text, size) == [("read", '{"path":"}{"}'), ("list", "{}")]


OWN = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("tools", [(READ,), (READ, LIST)])
def test_an_engine_without_guided_decoding_may_call_in_the_models_syntax(
    tools: tuple[Tool, ...], size: int
) -> None:
    constraint = required_call(ToolChoice("required"), *tools)
    assert read(constraint, f" {OWN}", size) == [("read", '{"path": "a"}')]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("text", ["I cannot.", "[", " [1]"])
def test_an_answer_without_a_call_is_text(text: str, size: int) -> None:
    assert read(required_call(ToolChoice("required"), READ, LIST), text, size, rest=text) == []


def test_an_incomplete_call_is_text() -> None:
    parser = required_call(ToolChoice("required"), READ, LIST).parser(PlainText(), PlainText())
    events = [*parser.feed('[{"name": "re'), *parser.finish()]
    assert events == [TextDelta('{"name": "re')]


STRICT = Tool("book", "", {"type": "object", "required": ["day"]}, namespace="trip", strict=True)


def structural_tag(parser: str | None, *tools: Tool, mode: Literal["auto", "none"] = "auto") -> Any:
    request = GenerateRequest(
        id="r",
        model="m",
        sampling=Sampling(max_tokens=9),
        tools=list(tools),
        tool_choice=ToolChoice(mode),
    )
    constraint = strict_tool_tags(request, parser)
    assert constraint is None or constraint.kind == "structural_tag"
    return constraint and json.loads(constraint.value)


def test_only_strict_tools_constrain_the_choice_auto() -> None:
    assert structural_tag("hermes", READ, LIST, PATCH) is None
    assert structural_tag("hermes", STRICT, mode="none") is None
    for parser in ("qwen3_coder", "pythonic", "harmony", "mistral", None):
        assert structural_tag(parser, STRICT) is None


def test_each_tool_has_its_tag() -> None:
    constraint = structural_tag("hermes", READ, STRICT)
    assert constraint["type"] == "structural_tag"
    assert constraint["format"]["triggers"] == ["<tool_call>"]
    read, book = constraint["format"]["tags"]
    assert read["begin"] == '<tool_call>\n{"name": "read", "arguments": '
    assert read["content"]["json_schema"] == {"type": "object"}
    assert book["begin"] == '<tool_call>\n{"name": "trip__book", "arguments": '
    assert book["content"]["json_schema"] == STRICT.parameters
    assert book["end"] == "}\n</tool_call>"


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


@pytest.mark.parametrize("parser", sorted(CALL_TAGS))
def test_the_parser_reads_output_that_a_tag_permits(parser: str) -> None:
    constraint = structural_tag(parser, STRICT, READ)["format"]
    for tag, name in zip(constraint["tags"], ("book", "read"), strict=True):
        assert tag["begin"].startswith(constraint["triggers"][0])
        events = OutputGrammar(parser).parser([STRICT, READ]).feed(f"I look.\n{written(tag)}")
        assert [e.name for e in events if isinstance(e, ToolCallStart)] == [name]
        arguments = "".join(e.arguments for e in events if isinstance(e, ToolCallDelta))
        assert json.loads(arguments) == {"day": 1}
        assert any(isinstance(e, ToolCallEnd) for e in events)
