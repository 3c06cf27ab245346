"""The nvext extension of request bodies."""

from typing import Any

import pytest
from unit.frontend.apis.bodies import request

from kvmesh.frontend.apis.nvext import MAX_IGNORED, MAX_INT
from kvmesh.frontend.apis.request_hints import unknown_headers
from kvmesh.frontend.errors import InvalidRequest


def test_nvext_shapes_the_request() -> None:
    made = request(
        nvext={
            "agent_hints": {"priority": -3, "strict_priority": 2, "latency_sensitivity": 0.5},
            "session_control": {"session_id": "s", "action": "close"},
            "token_data": [1, 2, 3],
            "greed_sampling": True,
            "routing_constraints": {"labels": {"zone": "a"}},
            "extra_fields": ["timing"],
        }
    )
    assert (made.hints.priority, made.hints.strict_priority) == (-3, 2)
    assert (made.hints.session, made.hints.session_final) == ("s", True)
    assert made.prompts == [[1, 2, 3]]
    assert made.sampling.temperature == 0
    assert made.placement.labels == {"zone": "a"}
    assert made.extra_fields == {"timing"}


def test_fields_without_effect_are_listed_on_request() -> None:
    nvext = {"extra_fields": ["ignored", "routed_experts"], "annotations": ["x"], "novel": 1}
    made = request(nvext=nvext, verbosity="low", temperature=0.5)
    unknown = ["nvext.annotations[0]", "nvext.extra_fields[1]", "nvext.novel"]
    assert made.ignored == ["verbosity", *unknown]
    assert made.extra_fields == {"ignored"}


@pytest.mark.parametrize("stream", [True, False])
def test_annotations_are_those_of_streams(stream: bool) -> None:
    nvext = {"extra_fields": ["ignored"], "annotations": ["formatted_prompt", "token_ids"]}
    made = request(nvext=nvext, stream=stream)
    listed = [] if stream else ["nvext.annotations[0]", "nvext.annotations[1]"]
    assert made.annotations == {"formatted_prompt", "token_ids"}
    assert made.ignored == listed


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ({"latency_sensitivity": 5.0}, {"latency_sensitivity": 1.0}),
        ({"latency_sensitivity": -1}, {"latency_sensitivity": 0.0}),
        ({"osl": 0}, {"osl": None}),
        ({"osl": 1 << 40}, {"osl": MAX_INT}),
        ({"priority": -(1 << 70)}, {"priority": -MAX_INT}),
        ({"strict_priority": -3}, {"strict_priority": 0}),
    ],
)
def test_advice_out_of_range_is_clipped(hints: dict[str, Any], expected: dict[str, Any]) -> None:
    found = request(nvext={"agent_hints": hints}).hints
    assert {name: getattr(found, name) for name in expected} == expected


def test_taints_are_labels_of_workers() -> None:
    constraints = {"required_taints": ["decode/fast"], "preferred_taints": {"gpu=a": 2.0}}
    placement = request(nvext={"routing_constraints": constraints}).placement
    assert placement.taints == ["decode/fast"]
    assert placement.tolerate == ["decode/fast", "gpu=a"]
    assert placement.prefer == {"taint.gpu=a": 2.0}


@pytest.mark.parametrize(
    ("control", "ttl_s"),
    [
        ({"action": "open"}, 300.0),
        ({"action": "bind", "timeout": 60}, 60.0),
        ({"timeout": 90}, 90.0),
        ({}, None),
        ({"action": "close", "timeout": 60}, None),
    ],
)
def test_an_open_session_keeps_its_prompt(control: dict[str, Any], ttl_s: float | None) -> None:
    made = request(nvext={"session_control": {"session_id": "s", **control}})
    assert made.prompt_ttl_s == ttl_s
    assert made.hints.session_final == (control.get("action") == "close")


def test_the_list_of_fields_without_effect_is_bounded() -> None:
    fields: dict[str, Any] = {f"f{n}": n for n in range(5000)}
    made = request(nvext={"extra_fields": ["ignored"]}, **fields)
    assert len(made.ignored) == len(set(made.ignored)) == MAX_IGNORED


def test_nested_fields_without_effect_are_listed_with_their_place() -> None:
    nvext = {"extra_fields": ["ignored"], "agent_hints": {"priorty": 1, "osl": 4}}
    part = {"type": "text", "text": "hi", "cache_controll": {}}
    made = request(
        nvext=nvext,
        messages=[{"role": "user", "content": [part]}],
        tools=[
            {"type": "function", "function": {"name": "f", "parameters": {"x": 1}, "stric": True}}
        ],
    )
    assert made.ignored == [
        "messages[0].content[0].cache_controll",
        "tools[0].function.stric",
        "nvext.agent_hints.priorty",
    ]


def test_mistyped_headers_are_known() -> None:
    headers = {"X-Kvmesh-Polcy": "kv", "x-dynamo-priority": "1", "x-other": "1"}
    assert unknown_headers(headers) == ["header x-kvmesh-polcy"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"nvext": {"session_control": {"session_id": "a", "action": "opne"}}},
            "Invalid enum value 'opne'; allowed: ",
        ),
        (
            {"nvext": {"cache_control": {"ttl": "xx"}}},
            "Invalid value; allowed: a duration such as 30s",
        ),
        ({"nvext": {"cache_control": {"type": "ephemerall"}}}, "allowed: ephemeral"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "allowed: assistant"),
    ],
)
def test_errors_name_what_is_allowed(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        request(**fields)
    assert text in raised.value.message
