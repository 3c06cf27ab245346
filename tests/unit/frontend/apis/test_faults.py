"""Faults of bodies: codes of OpenAI's APIs by kind, and whole floats in place of integers."""

import json
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Raw, Struct
from support.stamp import STAMP
from unit.frontend.apis.bodies import headers
from unit.frontend.apis.prompts import request_of

from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.base import Api, check_length, check_range, decode
from kvmesh.frontend.apis.tokens import Tokenize
from kvmesh.frontend.errors import ApiError, InvalidRequest
from kvmesh.frontend.http.routes import COUNTING, GENERATING
from kvmesh.frontend.http.tokenize import CountingApi


class Part(Struct):
    index: int = 0


class Faulty(Struct):
    name: str
    count: Annotated[int, Meta(ge=1, le=5)] | None = None
    share: Annotated[float, Meta(ge=0, lt=2)] = 1
    stop: Annotated[list[str], Meta(min_length=1, max_length=3)] | None = None
    word: Annotated[str, Meta(min_length=1, max_length=3)] | None = None
    pair: Annotated[list[int], Meta(min_length=2)] | None = None
    kind: Literal["a", "b"] = "a"
    ids: str | list[list[int]] = ""
    parts: list[Part] = []
    bias: dict[str, int] = {}
    form: Raw = Raw(b"{}")


DECODER = msgspec.json.Decoder(Faulty)


def fault(**fields: Any) -> tuple[str | None, Any]:
    with pytest.raises(InvalidRequest) as caught:
        decode(DECODER, json.dumps({"name": "x", **fields}).encode())
    shown = openai.error_object(caught.value)["error"]
    return shown["param"], shown["code"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"count": 0}, "integer_below_min_value"),
        ({"count": 6}, "integer_above_max_value"),
        ({"share": -0.5}, "decimal_below_min_value"),
        ({"share": 2}, "decimal_above_max_value"),
        ({"stop": []}, "empty_array"),
        ({"stop": ["a"] * 4}, "array_above_max_length"),
        ({"pair": [1]}, "array_below_min_length"),
        ({"word": ""}, "empty_string"),
        ({"word": "long"}, "string_above_max_length"),
        ({"kind": "c"}, "invalid_value"),
        ({"kind": 5}, "invalid_type"),
        ({"count": "1"}, "invalid_type"),
        ({"count": 1.5}, "invalid_type"),
        ({"stop": {}}, "invalid_type"),
    ],
)
def test_a_fault_has_the_code_of_its_kind(fields: dict[str, Any], code: str) -> None:
    assert fault(**fields) == (next(iter(fields)), code)


def test_a_missing_field_and_a_wrong_body_have_codes() -> None:
    for body, param, code in (
        (b"{}", "name", "missing_required_parameter"),
        (b"[]", None, "invalid_type"),
        (b"{", None, None),
    ):
        with pytest.raises(InvalidRequest) as caught:
            decode(DECODER, body)
        assert (caught.value.param, caught.value.code) == (param, code)


def test_bounds_that_are_checked_later_have_the_same_codes() -> None:
    for value, code in ((9.0, "decimal_above_max_value"), (-1, "integer_below_min_value")):
        with pytest.raises(InvalidRequest) as caught:
            check_range(value, 0, 2, "n")
        assert caught.value.code == code
    for length, code in ((0, "empty_array"), (3, "array_above_max_length")):
        with pytest.raises(InvalidRequest) as caught:
            check_length(length, 1, 2, "messages")
        assert caught.value.code == code
    check_range(None, 0, 2, "n")


def test_whole_floats_are_integers_where_these_are_expected() -> None:
    body = {
        "name": "x",
        "count": 3.0,
        "share": 1.0,
        "ids": [[1.0, 2], [3.0]],
        "parts": [{"index": 1.0}, {"index": 2e0}],
        "bias": {"5": 1.0, "6": 2},
        "form": {"value": 5.0},
    }
    found = decode(DECODER, json.dumps(body).encode())
    assert (found.count, found.ids, found.bias) == (3, [[1, 2], [3]], {"5": 1, "6": 2})
    assert [part.index for part in found.parts] == [1, 2]
    assert found.share == 1.0
    assert json.loads(bytes(found.form)) == {"value": 5.0}
    assert b"5.0" in bytes(found.form)
    assert fault(count=3.5) == ("count", "invalid_type")
    assert fault(ids=[[1.0, 2.5]])[1] == "invalid_type"
    assert fault(count=9.0) == ("count", "integer_above_max_value")
    assert fault(count=1e300)[1] == "integer_above_max_value"


NUMBERS = ["1e400", "-1e999", "9" * 5000]
USER = '{"role": "user", "content": "x"}'
PLACES = {
    "chat": [
        '"messages": [USER], "tools": [{"type": "function", "function": {"name": "f",'
        ' "parameters": {"maximum": NUMBER}}}]',
        '"messages": [USER], "tools": [{"type": "later", "x": NUMBER, "function": 5}]',
        '"messages": [{"role": "user", "content": [{"type": "text", "text": NUMBER}]}]',
        '"messages": [{"role": "user", "content": [{"type": "later", "x": NUMBER}]}]',
    ],
    "messages": [
        '"messages": [USER], "tools": [{"name": "f", "input_schema": {"maximum": NUMBER}}]',
        '"messages": [{"role": "assistant", "content":'
        ' [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": NUMBER}}]}]',
        '"messages": [{"role": "user", "content": [{"type": "later", "x": NUMBER}]}]',
    ],
    "responses": [
        '"input": [USER, {"type": "later_call", "x": [NUMBER], "output": "o"}]',
        '"input": [{"role": "user", "content": [{"type": "later", "x": NUMBER}]}]',
        '"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": NUMBER}}]',
    ],
}


@pytest.mark.parametrize("number", NUMBERS, ids=["float", "negative", "integer"])
@pytest.mark.parametrize(("api", "place"), [(a, p) for a, ps in PLACES.items() for p in ps])
def test_numbers_out_of_range_are_faults_of_the_body(api: str, place: str, number: str) -> None:
    fields = place.replace("NUMBER", number).replace("USER", USER)
    body = f'{{"model": "m", {fields}}}'
    with pytest.raises(InvalidRequest) as caught:
        request_of(api, body.encode())
    assert str(caught.value.param).split("[")[0].split(".")[0] in ("messages", "tools", "input")


ASK = {"role": "user", "content": "x"}
MISSING_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        "chat",
        {"messages": [ASK], "response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
    ),
    ("chat", {"messages": [ASK], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ("chat", {"messages": [ASK], "tools": [{"type": "function"}]}, "tools[0].function"),
    ("chat", {"messages": [ASK], "tools": [{"type": "custom"}]}, "tools[0].custom"),
    (
        "chat",  # the form of Responses
        {"messages": [ASK], "tools": [{"type": "function", "name": "f", "parameters": {}}]},
        "tools[0].function",
    ),
    (
        "chat",
        {"messages": [ASK], "tools": [{"type": "function", "function": {"name": ""}}]},
        "tools[0].function.name",
    ),
    *(
        ("chat", {"messages": [{"role": role, **content}]}, "messages[0].content")
        for role in ("system", "developer", "user")
        for content in ({}, {"content": None})
    ),
    ("chat", {"messages": [{"role": "function", "content": "1"}]}, "messages[0].name"),
    ("messages", {"messages": [{"role": "user"}]}, "messages[0].content"),
    *(
        (api, {field: [{"role": "user", "content": [{"type": kind, "content": "x"}]}]}, place)
        for api, field, kind, place in (
            ("chat", "messages", "text", "messages[0].content[0].text"),
            ("messages", "messages", "text", "messages.0.content.0.text"),
            ("responses", "input", "input_text", "input[0].content[0].text"),
        )
    ),
    ("responses", {"input": [{"role": "user"}]}, "input[0].content"),
    (
        "responses",
        {"input": [{"type": "function_call_output", "call_id": "c", "content": "x"}]},
        "input[0].output",
    ),
    ("messages", {"messages": [ASK], "tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ("messages", {"messages": [ASK], "tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
    (
        "messages",  # the form of chat
        {"messages": [ASK], "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools[0].name",
    ),
    ("messages", {"messages": [ASK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ("responses", {}, "input"),
    ("responses", {"input": [{"x": 1}]}, "input[0].type"),
    ("responses", {"input": [{"type": "item_reference"}]}, "input[0].id"),
    ("responses", {"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
    (
        "responses",
        {"input": [{"type": "function_call_output", "output": "x"}]},
        "input[0].call_id",
    ),
    (
        "responses",
        {"input": "x", "text": {"format": {"type": "json_schema"}}},
        "text.format.name",
    ),
    (
        "responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}},
        "text.format.schema",
    ),
    ("responses", {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    (
        "responses",  # the form of chat
        {"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools[0].name",
    ),
    ("responses", {"input": "x", "tool_choice": {"type": "function"}}, "tool_choice.name"),
]


@pytest.mark.parametrize(("api", "fields", "param"), MISSING_FIELDS)
def test_a_field_that_is_missed_later_has_the_same_code(
    api: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of(api, fields)
    assert (caught.value.param, caught.value.code) == (param, "missing_required_parameter")


EVERY: dict[str, Api | CountingApi] = {**GENERATING, **COUNTING}
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}


@pytest.mark.parametrize("path", EVERY)
def test_every_api_takes_whole_floats_and_names_faults(path: str) -> None:
    limit = "max_output_tokens" if path.startswith("/v1/responses") else "max_tokens"
    body = {**BODY, "input": "Hi", limit: 30.0, "top_k": 3.0, "n": 1.0}
    if path == "/v1/tokenize":
        del body["messages"]
    if path.startswith("/v1/responses"):
        del body["prompt"]
    EVERY[path].parse(json.dumps(body).encode(), headers(), STAMP)
    with pytest.raises(ApiError) as caught:
        EVERY[path].parse(b'{"messages": []}', headers(), STAMP)
    assert (caught.value.param, caught.value.code) == ("model", "missing_required_parameter")


def test_tokenizing_takes_the_fields_that_change_a_prompt() -> None:
    def parsed(**fields: Any) -> Any:
        return Tokenize().parse(json.dumps({"model": "m", **fields}).encode(), {}, STAMP).request

    assert parsed(messages=[ASK], reasoning_effort="none").thinking is False
    assert parsed(prompt="x", add_special_tokens=True).prompts == ["x"]
    for fields, param in (({}, "prompt"), ({"prompt": "x"}, "add_special_tokens")):
        with pytest.raises(InvalidRequest) as caught:
            parsed(**fields, add_special_tokens=False)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [ASK], "chat_template": "x"}, "chat_template"),
        ({"messages": [ASK], "documents": [{"text": "x"}]}, "documents"),
        ({"messages": [ASK], "system": "Be brief."}, "system"),
        ({"messages": [ASK], "functions": [{"name": "f"}]}, "functions"),
        ({"messages": [ASK], "prompt": "x"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": "x", "return_token_strs": True}, "return_token_strs"),
    ],
)
def test_tokenizing_refuses_what_would_change_the_tokens(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Tokenize().parse(json.dumps({"model": "m", **fields}).encode(), {}, STAMP)
    assert caught.value.param == param


def test_tokens_are_counted_of_a_whole_chat_request() -> None:
    fields = {"messages": [ASK], "max_tokens": 5, "stream": True, "prompt": None}
    parsed = Tokenize().parse(json.dumps({"model": "m", **fields}).encode(), {}, STAMP).request
    assert parsed.messages == request_of("chat", {"messages": [ASK]}).messages
