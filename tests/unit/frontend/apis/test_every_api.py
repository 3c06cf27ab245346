"""Properties that all APIs share: errors, invalid fields, robustness."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stamp import STAMP
from unit.frontend.apis.answers import ANSWER, APIS, body, events, whole

from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.base import Api, Ending
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.messages import api as messages
from kvmesh.frontend.apis.messages.api import CountTokens
from kvmesh.frontend.apis.responses.api import InputTokens, Responses
from kvmesh.frontend.apis.tokens import Tokenize
from kvmesh.frontend.errors import (
    STATUS,
    ApiError,
    ContextExceeded,
    InvalidRequest,
    Kind,
    Overloaded,
)


@pytest.mark.parametrize("api", APIS, ids=lambda s: s.name)
def test_an_error_in_a_stream_has_the_api_s_shape(api: Api) -> None:
    renderer = api.parse(body(api, stream=True), {}, STAMP).renderer
    renderer.begin()
    sent = events(renderer.failed(Overloaded("full")))
    text = json.dumps(sent[0])
    assert "full" in text
    if api.name == "responses":
        assert sent[0]["type"] == "response.failed"
        assert sent[0]["response"]["error"]["code"] == "server_is_overloaded"
    elif api.name == "messages":
        assert sent[0]["type"] == "error"
        assert sent[0]["error"]["type"] == "overloaded_error"
    else:
        assert sent[-1] == "[DONE]"


def test_the_context_error_has_the_text_that_clients_parse() -> None:
    long, both = ContextExceeded(900, None, 500), ContextExceeded(400, 200, 500)
    status, text = openai.SHAPE.error(long, "req_1")
    assert status == 400
    assert json.loads(text)["error"]["code"] == "context_length_exceeded"
    status, text = messages.SHAPE.error(long, "req_1")
    assert status == 400
    assert b"prompt is too long: 900 tokens > 500 maximum" in text
    assert json.loads(text)["request_id"] == "req_1"
    expected = b"input length and `max_tokens` exceed context limit: 400 + 200 > 500"
    assert expected in messages.SHAPE.error(both, "req_1")[1]


@pytest.mark.parametrize("kind", STATUS)
def test_every_kind_of_error_has_a_type_and_a_status_in_both_shapes(kind: Kind) -> None:
    error = ApiError(kind, "text", code="code", param="param")
    status, text = openai.SHAPE.error(error, "req_1")
    assert status == (429 if kind == "overloaded" else STATUS[kind])
    assert json.loads(text)["error"] == {
        "message": "text",
        "type": openai.TYPES[kind],
        "param": "param",
        "code": "code",
    }
    status, text = messages.SHAPE.error(error, "req_1")
    assert status == STATUS[kind]
    assert json.loads(text) == {
        "type": "error",
        "error": {"type": messages.TYPES[kind], "message": "text"},
        "request_id": "req_1",
    }


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_ids_and_times_derive_from_the_stamp(api: Api) -> None:
    first, second = (whole(api, ANSWER, Ending("stop")) for _ in range(2))
    assert first == second
    assert STAMP.token in first["id"]
    assert first.get("created", first.get("created_at", STAMP.created)) == STAMP.created


@pytest.mark.parametrize("api", [Chat(), Responses()])
def test_a_custom_tool_s_grammar_may_be_a_regular_expression(api: Api) -> None:
    for syntax, regex in (("lark", False), ("regex", True)):
        grammar = {"syntax": syntax, "definition": "[0-9]+"}
        custom = {"name": "date", "format": {"type": "grammar", "grammar": grammar}}
        flat = {"type": "custom", "name": "date", "format": {"type": "grammar", **grammar}}
        tool = flat if isinstance(api, Responses) else {"type": "custom", "custom": custom}
        (made,) = api.parse(body(api, tools=[tool]), {}, STAMP).request.tools
        assert (made.grammar, made.regex) == ("[0-9]+", regex)


WRONG = [
    {"model": 3},
    {"stream": "yes"},
    {"temperature": "hot"},
    {"top_p": 7},
    {"nvext": {"agent_hints": {"latency_sensitivity": "3"}}},
    {"nvext": {"token_data": [-1]}},
    {"nvext": []},
]


@pytest.mark.parametrize("api", APIS, ids=lambda s: s.name)
@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_an_invalid_field_is_named(api: Api, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        api.parse(body(api, **fields), {}, STAMP)
    assert error.value.param is not None
    assert error.value.param.split(".")[0].split("[")[0] == next(iter(fields))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "name", "input", "function", "schema", "tools"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


FIELDS = st.sampled_from(
    [
        *("messages", "input", "prompt", "tools", "tool_choice", "response_format", "text"),
        *("system", "stop", "nvext", "thinking", "logit_bias", "n", "reasoning", "store"),
    ]
)


PARSERS = [*APIS, CountTokens(), InputTokens(), Tokenize()]


@given(st.sampled_from(PARSERS), st.dictionaries(FIELDS, JSON_VALUES, max_size=4))
def test_any_json_is_parsed_or_refused_with_400(parser: Any, fields: dict[str, Any]) -> None:
    sent = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", **fields}
    fault: ApiError | None = None
    try:
        parser.parse(json.dumps(sent).encode(), {}, STAMP)
    except ApiError as error:
        fault = error
    assert fault is None or STATUS[fault.kind] == 400


@given(st.sampled_from(PARSERS), st.binary(max_size=60))
def test_any_bytes_are_refused_with_400(parser: Any, sent: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parser.parse(sent, {}, STAMP)


FUNCTION = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("name", "fields", "param"),
    [
        ("chat", {"tool_choice": {"type": "auto"}}, "tool_choice.type"),
        ("chat", {"tool_choice": FUNCTION}, "tool_choice.function"),
        (
            "chat",
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]}},
            "tool_choice.allowed_tools",
        ),
        ("responses", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ("responses", {"tool_choice": {"type": "mcp", "name": "f"}}, "tool_choice"),
        ("chat", {"response_format": {"type": "grammar"}}, "response_format.type"),
        ("responses", {"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ("messages", {"output_format": {"type": "json_object"}}, "output_format.type"),
        ("messages", {"output_config": {"format": {"type": "x"}}}, "output_config.format.type"),
    ],
)
def test_a_form_of_the_answer_that_cannot_be_had_is_refused(
    name: str, fields: dict[str, Any], param: str
) -> None:
    api = next(api for api in APIS if api.name == name)
    with pytest.raises(InvalidRequest) as caught:
        api.parse(body(api, **fields), {}, STAMP)
    assert caught.value.param == param
