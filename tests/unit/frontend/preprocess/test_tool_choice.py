"""Calls that the caller insists on: what the engine is asked for, and how its answer reads."""

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


def must(choice: ToolChoice, *tools: Tool, parallel: bool = True) -> RequiredToolCall | None:
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


def found(choice: ToolChoice, *tools: Tool) -> RequiredToolCall:
    made = must(choice, *tools)
    assert made is not None
    return made


def read(made: RequiredToolCall, text: str, size: int) -> list[tuple[str, str]]:
    """Name and arguments of every call that `text` makes, however it is cut."""
    parser = made.parser(PlainText())
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
        else:
            assert isinstance(event, ToolCallEnd)
    return calls


def test_nothing_is_forced_where_the_model_may_choose() -> None:
    assert must(ToolChoice(), READ) is None
    assert must(ToolChoice("none"), READ) is None


def test_a_choice_that_cannot_be_met_is_refused() -> None:
    for choice, tools in ((ToolChoice("named", "x"), [READ]), (ToolChoice("required"), [])):
        with pytest.raises(InvalidRequest) as error:
            must(choice, *tools)
        assert error.value.param == "tool_choice"


def test_one_tool_is_guided_by_its_own_schema() -> None:
    made = found(ToolChoice("named", "read"), READ, LIST)
    assert made.guided.kind == "json_schema"
    assert json.loads(made.guided.value) == READ.parameters
    custom = found(ToolChoice("named", "patch"), PATCH)
    assert (custom.guided.kind, custom.guided.value) == ("grammar", "start: /.+/")
    pattern = Tool("date", "", {}, custom=True, grammar="[0-9]+", regex=True)
    dated = found(ToolChoice("named", "date"), pattern)
    assert (dated.guided.kind, dated.guided.value) == ("regex", "[0-9]+")


def test_several_tools_are_guided_by_a_list_of_calls() -> None:
    schema: Any = json.loads(found(ToolChoice("required"), READ, LIST).guided.value)
    assert schema["type"] == "array"
    assert schema["minItems"] == 1
    names = [entry["properties"]["name"]["enum"] for entry in schema["items"]["anyOf"]]
    assert names == [["read"], ["list"]]
    single = must(ToolChoice("required"), READ, LIST, parallel=False)
    assert single is not None
    assert json.loads(single.guided.value)["maxItems"] == 1


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_arguments_pass_as_they_come(size: int) -> None:
    made = found(ToolChoice("named", "read"), READ)
    assert read(made, '\n{"path": "a}b"}', size) == [("read", '{"path": "a}b"}')]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_list_of_calls_is_read_call_by_call(size: int) -> None:
    text = '[{"name": "read", "parameters": {"path": "}{"}},\n {"name": "list", "parameters": {}}]'
    made = found(ToolChoice("required"), READ, LIST)
    assert read(made, text, size) == [("read", '{"path":"}{"}'), ("list", "{}")]


def test_what_breaks_off_is_text() -> None:
    parser = found(ToolChoice("required"), READ, LIST).parser(PlainText())
    events = [*parser.feed('[{"name": "re'), *parser.finish()]
    assert events == [TextDelta('{"name": "re')]


STRICT = Tool("book", "", {"type": "object", "required": ["day"]}, namespace="trip", strict=True)


def may(parser: str | None, *tools: Tool, mode: Literal["auto", "none"] = "auto") -> Any:
    request = GenerateRequest(
        id="r",
        model="m",
        sampling=Sampling(max_tokens=9),
        tools=list(tools),
        tool_choice=ToolChoice(mode),
    )
    made = strict_tool_tags(request, parser)
    assert made is None or made.kind == "structural_tag"
    return made and json.loads(made.value)


def test_only_strict_tools_constrain_a_free_choice() -> None:
    assert may("hermes", READ, LIST, PATCH) is None
    assert may("hermes", STRICT, mode="none") is None
    for parser in ("qwen3_coder", "pythonic", "harmony", "mistral", None):
        assert may(parser, STRICT) is None


def test_each_tool_has_its_tag() -> None:
    made = may("hermes", READ, STRICT)
    assert made["type"] == "structural_tag"
    assert made["format"]["triggers"] == ["<tool_call>"]
    read, book = made["format"]["tags"]
    assert read["begin"] == '<tool_call>\n{"name": "read", "arguments": '
    assert read["content"]["json_schema"] == {"type": "object"}
    assert book["begin"] == '<tool_call>\n{"name": "trip__book", "arguments": '
    assert book["content"]["json_schema"] == STRICT.parameters
    assert book["end"] == "}\n</tool_call>"


def written(node: Any) -> str:
    """What a model may write under a tag."""
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
def test_the_parser_reads_what_the_tag_allows(parser: str) -> None:
    made = may(parser, STRICT, READ)["format"]
    for tag, name in zip(made["tags"], ("book", "read"), strict=True):
        assert tag["begin"].startswith(made["triggers"][0])
        events = OutputGrammar(parser).parser([STRICT, READ]).feed(f"I look.\n{written(tag)}")
        assert [e.name for e in events if isinstance(e, ToolCallStart)] == [name]
        told = "".join(e.arguments for e in events if isinstance(e, ToolCallDelta))
        assert json.loads(told) == {"day": 1}
        assert any(isinstance(e, ToolCallEnd) for e in events)
