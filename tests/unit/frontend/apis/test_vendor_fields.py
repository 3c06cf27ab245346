"""Every field that the vendors' SDKs can send is used, refused by name, or listed as ignored."""

from collections.abc import Mapping
from typing import (
    Any,
    get_args,
    get_type_hints,
)

import msgspec
import pytest
from anthropic.types.beta import BetaThinkingConfigParam as ThinkingConfig
from anthropic.types.beta import message_create_params as messages_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params
from support.stamp import STAMP
from unit.frontend.apis.answers import USAGE, body
from unit.frontend.apis.prompts import APIS

from kvmesh.frontend.apis.base import AnswerSummary, Ending
from kvmesh.frontend.conversation import TextDelta
from kvmesh.frontend.errors import InvalidRequest

PARAMETERS: dict[str, type] = {
    "chat": chat_params.CompletionCreateParamsBase,
    "completions": completion_create_params.CompletionCreateParamsBase,
    "messages": messages_params.MessageCreateParamsBase,
    "responses": responses_params.ResponseCreateParamsBase,
}
HEADERS = {"betas", "user_profile_id", "workspace_id"}  # not of the body
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
OWN = {"name": "f", "input_schema": {"type": "object"}}
ASK = [{"role": "user", "content": "Other"}]
SCHEMA = {"type": "json_schema", "name": "s", "schema": {"type": "object"}}
USED: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": ASK,
        "model": "other",
        "frequency_penalty": 0.5,
        "logit_bias": {"7": 5},
        "logprobs": True,
        "max_completion_tokens": 5,
        "max_tokens": 5,
        "n": 2,
        "parallel_tool_calls": False,
        "presence_penalty": 0.5,
        "prompt_cache_key": "k",
        "prompt_cache_options": {"ttl": "1h"},
        "prompt_cache_retention": "24h",
        "reasoning_effort": "low",
        "response_format": {"type": "json_object"},
        "seed": 1,
        "stop": "x",
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "tool_choice": "none",
        "tools": [TOOL],
        "top_logprobs": 2,
        "top_p": 0.5,
    },
    "completions": {
        "model": "other",
        "prompt": "Other",
        "echo": True,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": 5},
        "logprobs": 1,
        "max_tokens": 5,
        "n": 2,
        "presence_penalty": 0.5,
        "seed": 1,
        "stop": "x",
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.5,
    },
    "messages": {
        "max_tokens": 5,
        "messages": ASK,
        "model": "other",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "diagnostics": {"previous_message_id": "m"},
        "metadata": {"user_id": '{"session_id": "s"}'},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "system": "Be brief.",
        "temperature": 0.5,
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "none"},
        "tools": [OWN],
        "top_k": 5,
        "top_p": 0.5,
    },
    "responses": {
        "include": ["message.output_text.logprobs"],
        "input": "Other",
        "instructions": "Be brief.",
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
        "model": "other",
        "parallel_tool_calls": False,
        "previous_response_id": "resp_1",
        "prompt_cache_key": "k",
        "prompt_cache_options": {"ttl": "1h"},
        "prompt_cache_retention": "24h",
        "reasoning": {"effort": "low"},
        "background": True,
        "context_management": [{"type": "compaction"}],
        "conversation": "conv_1",
        "store": False,
        "temperature": 0.5,
        "text": {"format": SCHEMA},
        "tool_choice": "none",
        "tools": [FLAT],
        "top_logprobs": 2,
        "top_p": 0.5,
        "user": "u",
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "chat": {
        "audio": {"voice": "alloy", "format": "wav"},
        "function_call": "auto",
        "functions": [{"name": "f"}],
        "modalities": ["text", "audio"],
    },
    "completions": {"best_of": 3, "suffix": "end"},
    "messages": {
        "compaction": {"type": "enabled"},
        "container": "c",
        "mcp_servers": [{"type": "url", "name": "m", "url": "https://x.org"}],
        "thread": {"type": "create"},
    },
    "responses": {"prompt": {"id": "p"}},
}
LISTED: dict[str, dict[str, Any]] = {
    "chat": {
        "metadata": {"a": "b"},
        "moderation": {"model": "m"},
        "prediction": {"type": "content", "content": "x"},
        "safety_identifier": "s",
        "service_tier": "flex",
        "store": True,
        "user": "u",
        "verbosity": "low",
        "web_search_options": {},
    },
    "completions": {"user": "u"},
    "messages": {
        "billing_policy": {"type": "billing_policy", "bill_to": "self"},
        "fallback_credit_token": "t",
        "fallbacks": "default",
        "inference_geo": "us",
        "service_tier": "auto",
        "speed": "fast",
    },
    "responses": {
        "access_programs": {},
        "background_options": {},
        "image": {},
        "max_tool_calls": 1,
        "moderation": {"model": "m"},
        "safety_identifier": "s",
        "service_tier": "flex",
        "stream_options": {"include_obfuscation": False},
        "truncation": "auto",
    },
}
NEEDED: dict[
    tuple[str, str], dict[str, Any]
] = {  # fields without which others have no effect, or are refused
    ("chat", "top_logprobs"): {"logprobs": True},
    ("chat", "tool_choice"): {"tools": [TOOL]},
    ("chat", "stream_options"): {"stream": True},
    ("completions", "stream_options"): {"stream": True},
}


FOREIGN: list[tuple[str, str, Any]] = [
    ("chat", "modalities", ["text", "image"]),
    ("chat", "system", "Be brief."),
    ("chat", "instructions", "Be brief."),
    ("chat", "echo", True),
    ("messages", "stop", ["x"]),
    ("messages", "response_format", {"type": "json_object"}),
    ("completions", "prompt_embeds", "x"),
    ("completions", "max_completion_tokens", 5),
    ("completions", "add_special_tokens", False),
    ("responses", "stop", "x"),
    ("responses", "response_format", {"type": "json_object"}),
    ("chat", "max_output_tokens", 5),
    ("completions", "max_output_tokens", 5),
    *((api, "functions", [{"name": "f"}]) for api in ("messages", "responses")),
    *((api, "reasoning_effort", "low") for api in ("messages", "responses")),
    *(("messages", name, 5) for name in ("max_completion_tokens", "max_output_tokens")),
    *(("responses", name, 5) for name in ("max_completion_tokens", "max_tokens")),
]
FOREIGN += [
    (api, name, value)
    for api in ("chat", "completions")
    for name, value in {
        "stop_regex": "a+",
        "use_beam_search": True,
        "logits_processors": ["a"],
        "custom_logit_processor": "a",
        "lora_path": "a",
        "include_stop_str_in_output": True,
        "no_stop_trim": True,
        "stop_sequences": ["x"],
    }.items()
]


@pytest.mark.parametrize(("api", "name", "value"), FOREIGN)
def test_fields_of_other_apis_that_change_the_answer_are_refused(
    api: str, name: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest) as error:
        run(api, {name: value})
    assert error.value.param == name
    run(api, {name: None})


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": {"type": "object"}},
        {"type": "json_object", "json_schema": {"name": "s", "schema": {"type": "object"}}},
        {"type": "text", "json_schema": {"schema": {"type": "object"}}},
        {"type": "json_schema", "schema": {"type": "object"}},
    ],
)
def test_a_schema_is_followed_or_refused(api: str, form: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        run(api, {"response_format": form})
    assert error.value.param == "response_format"


def test_no_effort_is_no_thinking_in_every_openai_api() -> None:
    for api, fields in (
        ("chat", {"reasoning_effort": "none"}),
        ("responses", {"reasoning": {"effort": "none"}}),
    ):
        sent = body(APIS[api], **fields)
        assert APIS[api].parse(sent, {}, STAMP).request.thinking is False
    switched = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    sent = body(APIS["chat"], **switched)
    assert APIS["chat"].parse(sent, {}, STAMP).request.thinking is None


def test_a_prompt_that_is_only_to_be_cached_is_not_answered() -> None:
    """Several APIs can ask for the cache alone; the error names the way that kvmesh has."""
    for name, field, value in (
        ("chat", "prompt_cache_options", {"prewarm": True}),
        ("messages", "max_tokens", 0),
    ):
        with pytest.raises(InvalidRequest, match="/v1/prefetch") as error:
            run(name, {field: value})
        assert (error.value.param or "").startswith(field)
    run("chat", {"prompt_cache_options": {"prewarm": False}})


def test_only_a_known_type_of_thinking_switches_it() -> None:
    """The types are those of the SDK; the others leave the model its default, and are listed."""
    types = [get_args(get_type_hints(config)["type"])[0] for config in get_args(ThinkingConfig)]
    switched = {}
    for kind in [*types, "of_tomorrow"]:
        fields = {
            "thinking": {"type": kind} | ({"budget_tokens": 1024} if kind == "enabled" else {})
        }
        sent = body(APIS["messages"], **fields)
        switched[kind] = APIS["messages"].parse(sent, {}, STAMP).request.thinking
        known = kind in ("enabled", "disabled", "adaptive")
        assert ("thinking.type" in ignored("messages", fields)) != known
    assert switched.pop("enabled") is True
    assert switched.pop("disabled") is False
    assert set(switched.values()) == {None}


def test_a_budget_of_thinking_is_listed() -> None:
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert ignored("messages", fields) == []
    fields["thinking"]["type"] = "adaptive"
    assert ignored("messages", fields) == ["thinking.budget_tokens"]


def test_the_input_of_a_continued_response_may_be_null() -> None:
    run("responses", {"previous_response_id": "resp_1", "input": None})
    with pytest.raises(InvalidRequest) as error:
        run("responses", {"input": None})
    assert error.value.param == "input"


@pytest.mark.parametrize("api", PARAMETERS)
def test_the_tables_have_every_parameter_of_the_sdks(api: str) -> None:
    known = {*USED[api], *REFUSED[api], *LISTED[api]}
    assert set(get_type_hints(PARAMETERS[api])) - HEADERS - known == set()


def rows(table: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    return [
        pytest.param(api, name, value, id=f"{api}-{name}")
        for api, fields in table.items()
        for name, value in fields.items()
    ]


def run(api: str, fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """All that a body does: its request, its stored conversation and its answer."""
    sent = body(APIS[api], **fields)
    call = APIS[api].parse(sent, {}, STAMP)
    request = {
        name: value if name == "extra_fields" else repr(value)
        for name, value in msgspec.structs.asdict(call.request).items()
        if name not in ("span", "ignored")
    }
    thread = call.thread and (call.thread.previous, call.thread.store)
    call.renderer.events(0, [TextDelta("x")], [])
    call.renderer.end(0, Ending("stop"))
    return request, thread, call.renderer.whole(AnswerSummary(USAGE))


@pytest.mark.parametrize(("api", "name", "value"), rows(USED))
def test_a_used_parameter_changes_the_run(api: str, name: str, value: Any) -> None:
    needed = NEEDED.get((api, name), {})
    fields = {**needed, name: value}
    assert name not in ignored(api, fields)
    if name == "stream_options":
        call = APIS[api].parse(body(APIS[api], **fields), {}, STAMP)
        sent = call.renderer.begin() + call.renderer.end(0, Ending("stop"))
        assert b'"usage":null' in sent + call.renderer.done(AnswerSummary(USAGE))
    else:
        assert run(api, fields) != run(api, needed)


@pytest.mark.parametrize(("api", "name", "value"), rows(REFUSED))
def test_a_parameter_whose_loss_changes_the_answer_is_refused(
    api: str, name: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest, match=name) as error:
        run(api, {name: value})
    assert error.value.param == name
    empty: tuple[Any, ...] = (None, [], {})
    for neutral in empty:
        if isinstance(value, type(neutral)) or neutral is None:
            run(api, {name: neutral})


@pytest.mark.parametrize(("api", "name", "value"), rows(LISTED))
def test_a_parameter_without_effect_is_listed(api: str, name: str, value: Any) -> None:
    assert name in ignored(api, {name: value})


def ignored(api: str, fields: Mapping[str, Any]) -> list[str]:
    sent = body(APIS[api], **fields, nvext={"extra_fields": ["ignored"]})
    return APIS[api].parse(sent, {}, STAMP).request.ignored
