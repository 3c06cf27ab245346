"""The nvext extension of request bodies."""

from typing import Any

import pytest
from unit.frontend.apis.bodies import request

from kvmesh.frontend.apis.nvext import MAX_IGNORED
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
    nvext = {"extra_fields": ["ignored"], "annotations": ["x"], "novel": 1}
    made = request(nvext=nvext, verbosity="low", temperature=0.5)
    assert made.ignored == ["verbosity", "nvext.annotations", "nvext.novel"]


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
        ({"nvext": {"extra_fields": ["chache"]}}, "'chache' is none of worker_id, timing"),
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
