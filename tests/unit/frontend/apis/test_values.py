"""Values of enumerated and bounded fields: each API refuses those that it does not publish."""

import json
from collections.abc import Callable
from types import NoneType
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from anthropic.types.beta import BetaOutputConfigParam as OutputConfig
from multidict import MultiDict
from openai.types.responses import ResponseIncludable
from openai.types.responses import ResponseTextConfigParam as TextConfig
from openai.types.shared_params import Reasoning
from support.stamp import STAMP
from unit.frontend.apis.answers import body
from unit.frontend.apis.prompts import APIS

from kvmesh.frontend.apis.base import decode, decode_query
from kvmesh.frontend.apis.messages.api import error_object
from kvmesh.frontend.apis.pooling.embeddings import Embeddings
from kvmesh.frontend.apis.pooling.rerank import Rerank
from kvmesh.frontend.apis.responses.body import LOGPROBS
from kvmesh.frontend.apis.responses.conversations import parse_conversation
from kvmesh.frontend.apis.responses.input_items import ItemsQuery
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.http.batches.endpoints import BatchBody, BatchesQuery
from kvmesh.frontend.http.batches.files import FilesQuery
from kvmesh.frontend.http.batches.pages import PageQuery
from kvmesh.frontend.http.responses.endpoints import ResponseQuery

BOGUS = "bogus"
MANY = {str(number): "x" for number in range(17)}


def custom(**form: Any) -> dict[str, Any]:
    return {"type": "custom", "name": "f", "format": {"type": "grammar", **form}}


GRAMMAR = {"type": "grammar", "grammar": {"definition": "a", "syntax": BOGUS}}
SAMPLED: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": -1}, "min_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"response_format": {"type": BOGUS}}, "response_format.type"),
    ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern"),
    *(({"stream_options": options}, "stream_options") for options in ({}, {"include_usage": True})),
    *(
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": name, "schema": {}},
                }
            },
            "response_format.json_schema.name",
        )
        for name in ("", "two words", "n" * 65)
    ),
]
SHARED: list[tuple[dict[str, Any], str]] = [
    ({"prompt_cache_retention": BOGUS}, "prompt_cache_retention"),
    ({"prompt_cache_options": {"mode": BOGUS}}, "prompt_cache_options.mode"),
    ({"prompt_cache_options": {"ttl": BOGUS}}, "prompt_cache_options.ttl"),
    *(
        ({"structured_outputs": {"json_object": True, name: value}}, f"structured_outputs.{name}")
        for name, value in (
            ("disable_any_whitespace", True),
            ("disable_additional_properties", True),
            ("whitespace_pattern", " *"),
            ("structural_tag", "{}"),
        )
    ),
]
EVERY: list[tuple[dict[str, Any], str]] = [
    (
        {"nvext": {"session_control": {"session_id": "s", "action": BOGUS}}},
        "nvext.session_control.action",
    ),
    ({"nvext": {"retention": [{"start": 0, "priority": 101}]}}, "nvext.retention[0].priority"),
    ({"nvext": {"cache_control": {"ttl": BOGUS}}}, "nvext.cache_control.ttl"),
    ({"nvext": {"max_thinking_tokens": -1}}, "nvext.max_thinking_tokens"),
]
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat": [
        *SAMPLED,
        *SHARED,
        *EVERY,
        ({"reasoning_effort": BOGUS}, "reasoning_effort"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tool_choice": BOGUS}, "tool_choice"),
        ({"tool_choice": {"type": BOGUS, "function": {"name": "f"}}}, "tool_choice.type"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": BOGUS, "tools": []},
                }
            },
            "tool_choice.allowed_tools.mode",
        ),
        ({"modalities": [BOGUS]}, "modalities"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"messages": [{"role": BOGUS, "content": "a"}]}, "messages[0].role"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "f", "format": GRAMMAR}}]},
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": BOGUS}}}]},
            "tools[0].custom.format.type",
        ),
        ({"n": 2, "max_tokens": 4, "max_completion_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ],
    "completions": [
        *SAMPLED,
        *SHARED,
        *EVERY,
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"min_tokens": 17}, "min_tokens"),
    ],
    "messages": [
        *EVERY,
        ({"output_config": {"effort": BOGUS}}, "output_config.effort"),
        ({"output_config": {"format": {"type": BOGUS}}}, "output_config.format.type"),
        ({"output_format": {"type": BOGUS}}, "output_format.type"),
        ({"tool_choice": {"type": BOGUS}}, "tool_choice.type"),
        ({"cache_control": {"type": BOGUS}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2 hours"}}, "cache_control.ttl"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"messages": [{"role": BOGUS, "content": "a"}]}, "messages[0].role"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": BOGUS}]}},
            "context_management.edits.0.keep",
        ),
    ],
    "responses": [
        *SHARED,
        *EVERY,
        ({"include": [BOGUS]}, "include[0]"),
        ({"reasoning": {"effort": BOGUS}}, "reasoning.effort"),
        ({"reasoning": {"summary": BOGUS}}, "reasoning.summary"),
        ({"text": {"verbosity": BOGUS}}, "text.verbosity"),
        ({"text": {"format": {"type": BOGUS}}}, "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a.b", "schema": {}}}},
            "text.format.name",
        ),
        ({"truncation": BOGUS}, "truncation"),
        ({"tool_choice": BOGUS}, "tool_choice"),
        ({"tool_choice": {"type": BOGUS}}, "tool_choice"),
        ({"tools": [custom(syntax=BOGUS, definition="a")]}, "tools[0].format.syntax"),
        ({"tools": [{**custom(), "format": {"type": BOGUS}}]}, "tools[0].format.type"),
        ({"metadata": MANY}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata[...]"),
        ({"metadata": {"x" * 65: "a"}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        (
            {"context_management": [{"type": "compaction", "compact_threshold": 0}]},
            "context_management[0].compact_threshold",
        ),
        ({"input": [{"role": BOGUS, "content": "a"}]}, "input[0].role"),
    ],
}


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [(api, *row) for api, rows in REFUSED.items() for row in rows],
)
def test_a_value_that_is_not_published_is_refused(
    api: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        APIS[api].parse(body(APIS[api], **fields), {}, STAMP)
    assert error.value.param == param
    if api == "messages":  # published with dots
        message = error_object(error.value, "")["error"]["message"]
        assert "[" not in message
        assert not message.startswith("`") or "`:" not in message


OPEN: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"tools": [{"type": BOGUS}]}, "tools[0]"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": BOGUS}]}]},
        "messages[0].content[0]",
    ),
    ("messages", {"tools": [{"type": BOGUS, "name": "f"}]}, "tools[0]"),
    ("messages", {"thinking": {"type": BOGUS}}, "thinking.type"),
    (
        "messages",
        {"context_management": {"edits": [{"type": BOGUS}]}},
        "context_management.edits[0]",
    ),
    ("responses", {"tools": [{"type": BOGUS}]}, "tools[0]"),
    ("responses", {"input": [{"type": BOGUS}, {"role": "user", "content": "a"}]}, "input[0]"),
    ("responses", {"context_management": [{"type": BOGUS}]}, "context_management[0]"),
]


@pytest.mark.parametrize(("api", "fields", "path"), OPEN)
def test_a_type_of_a_newer_client_is_listed(api: str, fields: dict[str, Any], path: str) -> None:
    sent = body(APIS[api], **fields, nvext={"extra_fields": ["ignored"]})
    assert path in APIS[api].parse(sent, {}, STAMP).request.ignored


OTHERS: list[tuple[Callable[[], Any], str]] = [
    (lambda: pooled(Embeddings(), input="a", encoding_format=BOGUS), "encoding_format"),
    (lambda: pooled(Embeddings(), input="a", dimensions=0), "dimensions"),
    (lambda: pooled(Embeddings(), input=["a"] * 2049), "input"),
    (lambda: pooled(Rerank(), query="a", documents=["a"], top_n=-1), "top_n"),
    (lambda: parse_conversation(json.dumps({"metadata": MANY}).encode()), "metadata"),
    (lambda: parse_conversation(json.dumps({"items": [{}] * 21}).encode()), "items"),
    (lambda: batch(endpoint="/v1/bogus"), "endpoint"),
    (lambda: batch(completion_window="1h"), "completion_window"),
    (lambda: batch(metadata=MANY), "metadata"),
    (
        lambda: batch(output_expires_after={"anchor": BOGUS, "seconds": 3600}),
        "output_expires_after.anchor",
    ),
    (
        lambda: batch(output_expires_after={"anchor": "created_at", "seconds": 1}),
        "output_expires_after.seconds",
    ),
    (lambda: decode_query({"order": BOGUS}, ItemsQuery), "order"),
    (lambda: decode_query({"limit": "0"}, ItemsQuery), "limit"),
    (lambda: decode_query({"include": BOGUS}, ItemsQuery), "include[0]"),
    (
        lambda: decode_query(
            MultiDict([("include[]", LOGPROBS), ("include[]", BOGUS)]), ResponseQuery
        ),
        "include[1]",
    ),
    (lambda: decode_query({"order": BOGUS}, FilesQuery), "order"),
    (lambda: decode_query({"limit": "101"}, BatchesQuery), "limit"),
    (lambda: decode_query({"limit": "1001"}, PageQuery), "limit"),
    (lambda: decode_query({"stream": BOGUS}, ResponseQuery), "stream"),
]


def pooled(api: Embeddings | Rerank, **fields: Any) -> None:
    api.parse(json.dumps({"model": "m", **fields}).encode(), {}, STAMP)


def batch(**fields: Any) -> None:
    sent = {"input_file_id": "f", "endpoint": "/v1/responses", "completion_window": "24h"}
    decode(msgspec.json.Decoder(BatchBody), json.dumps({**sent, **fields}).encode())


@pytest.mark.parametrize(("decoded", "param"), OTHERS)
def test_other_endpoints_refuse_them_too(decoded: Callable[[], Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        decoded()
    assert error.value.param == param


def published(kind: type, name: str) -> list[str]:
    """The values that the SDKs' type of a body has for a field."""
    (literal,) = (each for each in get_args(get_type_hints(kind)[name]) if each is not NoneType)
    return [*get_args(literal)]


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    *(("responses", {"include": [name]}) for name in get_args(ResponseIncludable)),
    *(("responses", {"text": {"verbosity": v}}) for v in published(TextConfig, "verbosity")),
    *(("responses", {"reasoning": {"effort": v}}) for v in published(Reasoning, "effort")),
    *(("responses", {"reasoning": {"summary": v}}) for v in published(Reasoning, "summary")),
    *(("chat", {"reasoning_effort": v}) for v in published(Reasoning, "effort")),
    *(("messages", {"output_config": {"effort": v}}) for v in published(OutputConfig, "effort")),
]


@pytest.mark.parametrize(("api", "fields"), ACCEPTED)
def test_every_value_of_the_sdks_is_accepted(api: str, fields: dict[str, Any]) -> None:
    APIS[api].parse(body(APIS[api], **fields), {}, STAMP)
