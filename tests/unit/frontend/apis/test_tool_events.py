"""Reports of harnesses on tools: bodies, bounds, hooks."""

import json
from typing import Any

import pytest

from kvmesh.bus.messages import ToolEvent
from kvmesh.frontend.apis.base import decode
from kvmesh.frontend.apis.cache.tool_events import (
    MAX_EVENTS,
    MAX_NAME,
    MAX_REMAINING_S,
    check_session,
    hook_body,
    hook_decoder,
    hook_session,
    tool_decoder,
    tool_events,
)
from kvmesh.frontend.errors import InvalidRequest


def reported(*bodies: Any) -> list[ToolEvent]:
    body = bodies[0] if len(bodies) == 1 else list(bodies)
    return tool_events(decode(tool_decoder, json.dumps(body).encode()), "s", 9.0)


def test_one_event_or_a_list_of_them_is_a_body() -> None:
    started = {"event": "started", "call": "toolu_1", "tool": "Bash", "remaining_s": 120}
    first = ToolEvent(
        session="s", event="started", time=9.0, call="toolu_1", tool="Bash", remaining_s=120.0
    )
    assert reported(started) == [first]
    assert reported(started, {"event": "ended"}) == [
        first,
        ToolEvent(session="s", event="ended", time=9.0),
    ]


@pytest.mark.parametrize(
    ("given", "kept"), [(-5, 0.0), (0, 0.0), (1e300, MAX_REMAINING_S), (None, None)]
)
def test_an_absurd_time_is_clipped(given: float | None, kept: float | None) -> None:
    (event,) = reported({"event": "progress", "remaining_s": given})
    assert event.remaining_s == kept


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "event"),
        ({"event": "paused"}, "event"),
        ({"event": "started", "remaining_s": "soon"}, "remaining_s"),
        ({"event": "started", "tool": "x" * (MAX_NAME + 1)}, "tool"),
        ({"event": "started", "call": 7}, "call"),
        ([], None),
        ([{"event": "started"}] * (MAX_EVENTS + 1), None),
        ("started", None),
    ],
)
def test_a_malformed_body_names_its_field(body: Any, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(tool_decoder, json.dumps(body).encode())
    assert caught.value.param == param


def hook(name: str, **fields: Any) -> Any:
    given = {"session_id": "s", "hook_event_name": name, "tool_input": {"command": "ls"}, **fields}
    return decode(hook_decoder, json.dumps(given).encode())


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("PreToolUse", "started"),
        ("PermissionRequest", "awaiting_approval"),
        ("PostToolUse", "ended"),
        ("PostToolUseFailure", "ended"),
    ],
)
def test_a_hook_of_a_tool_is_an_event(name: str, event: str) -> None:
    body = hook_body(hook(name, tool_name="Bash", tool_use_id="toolu_1"))
    assert body is not None
    assert (body.event, body.tool, body.call) == (event, "Bash", "toolu_1")


def test_other_hooks_are_no_events_and_long_names_are_cut() -> None:
    assert hook_body(hook("SessionStart")) is None
    body = hook_body(hook("PreToolUse", tool_name="x" * 999))
    assert body is not None
    assert len(body.tool) == MAX_NAME


def test_the_hook_of_a_subagent_names_the_session_of_its_requests() -> None:
    assert hook_session(hook("PreToolUse")) == "s"
    assert hook_session(hook("PreToolUse", agent_id="a1")) == "s/a1"


def test_a_name_that_no_session_can_have_is_refused() -> None:
    check_session("x" * 512)
    with pytest.raises(InvalidRequest):
        check_session("x" * 513)
