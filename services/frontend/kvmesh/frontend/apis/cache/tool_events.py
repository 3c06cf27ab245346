"""Reports of harnesses on the tools of a session: bodies, and their translation. Pure."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvmesh.bus.messages import ToolEvent, ToolState
from kvmesh.frontend.apis.request_hints import MAX_ID
from kvmesh.frontend.errors import InvalidRequest

MAX_EVENTS = 64
MAX_NAME = 128
MAX_REMAINING_S = 7 * 86400.0
HOOKS: dict[str, ToolState] = {
    "PreToolUse": "started",
    "PermissionRequest": "awaiting_approval",
    "PostToolUse": "ended",
    "PostToolUseFailure": "ended",
}
ToolName = Annotated[str, Meta(max_length=MAX_NAME)]


class ToolBody(Struct, kw_only=True):
    """One event of a tool; `remaining_s` is the harness's own estimate, if it has one."""

    event: ToolState
    call: ToolName = ""
    tool: ToolName = ""
    remaining_s: float | None = None


class ClaudeCodeHook(Struct, kw_only=True):
    """The fields of a hook's input that are used; `agent_id` is that of a subagent."""

    session_id: Annotated[str, Meta(min_length=1)]
    hook_event_name: str
    agent_id: str | None = None
    tool_name: str = ""
    tool_use_id: str = ""


ToolBodies = ToolBody | Annotated[list[ToolBody], Meta(min_length=1, max_length=MAX_EVENTS)]
tool_decoder: "msgspec.json.Decoder[ToolBodies]" = msgspec.json.Decoder(ToolBodies)
hook_decoder = msgspec.json.Decoder(ClaudeCodeHook)


def tool_events(bodies: ToolBodies, session: str, now: float) -> list[ToolEvent]:
    """The events of a session at the Unix time `now`; an absurd `remaining_s` is clipped."""
    return [
        ToolEvent(
            session=session,
            event=body.event,
            time=now,
            call=body.call,
            tool=body.tool,
            remaining_s=_clipped(body.remaining_s),
        )
        for body in (bodies if isinstance(bodies, list) else [bodies])
    ]


def hook_body(hook: ClaudeCodeHook) -> ToolBody | None:
    """The event of a hook; None of a hook that is about no tool."""
    event = HOOKS.get(hook.hook_event_name)
    if event is None:
        return None
    return ToolBody(event=event, call=hook.tool_use_id[:MAX_NAME], tool=hook.tool_name[:MAX_NAME])


def hook_session(hook: ClaudeCodeHook) -> str:
    """The session of a hook, named as the headers of Claude Code's requests name it."""
    return f"{hook.session_id}/{hook.agent_id}" if hook.agent_id else hook.session_id


def check_session(name: str) -> None:
    """Raises InvalidRequest for a name that no request can have."""
    if len(name) > MAX_ID:
        raise InvalidRequest(f"Session ids must be at most {MAX_ID} characters long.", "id")


def _clipped(seconds: float | None) -> float | None:
    return None if seconds is None else min(max(seconds, 0.0), MAX_REMAINING_S)
