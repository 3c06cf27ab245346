"""Endpoints on which harnesses report the tools that their sessions run."""

from time import time
from typing import Any

from kvmesh.bus.client import Bus
from kvmesh.frontend import metrics
from kvmesh.frontend.apis.cache.tool_events import (
    ClaudeCodeHook,
    ToolBodies,
    check_session,
    hook_body,
    hook_session,
    tool_events,
)
from kvmesh.frontend.http.endpoint import EndpointCall
from kvmesh.frontend.namespaces import scoped


class ToolEventEndpoints:
    """Handlers of /v1/sessions/{id}/tools and /v1/hooks/claude-code.

    Routers get the events. An event changes nothing but their forecast of the session's return, so
    a session that nobody knows is no error.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def report(self, call: EndpointCall[ToolBodies]) -> dict[str, Any]:
        """Publish events of a session of the caller's tenant."""
        session = call.path_id
        count = self._publish(call.caller.tenant, session, call.parsed)
        return {"object": "session.tools", "session": session, "events": count}

    async def hook(self, call: EndpointCall[ClaudeCodeHook]) -> dict[str, Any]:
        """Publish the event of a hook; the empty answer has no effect on Claude Code."""
        body = hook_body(call.parsed)
        if body is not None:
            self._publish(call.caller.tenant, hook_session(call.parsed), body)
        return {}

    def _publish(self, tenant: str, session: str, bodies: ToolBodies) -> int:
        check_session(session)
        events = tool_events(bodies, scoped(tenant, session), time())
        for event in events:
            self._bus.post(self._bus.subjects.tool(event.session), event)
            metrics.tool_events.labels(event.event).inc()
        return len(events)
