"""Hints of a request: session, tenant, priority and placement, from headers and `nvext`."""

import re
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvmesh.bus.messages import TAINT, Hints, Placement
from kvmesh.frontend.apis.agent_kinds import agent_kind, is_load_generator
from kvmesh.frontend.apis.base import Headers
from kvmesh.frontend.apis.nvext import (
    MAX_INT,
    AgentContext,
    AgentHints,
    Nvext,
    RoutingConstraints,
    apply_nvext,
)
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.namespaces import check_name

HEADER_PREFIXES = ("x-kvmesh-", "x-dynamo-")
# Each hint with further names that Dynamo has for it, the first of which counts.
HINTS: dict[str, tuple[str, ...]] = {
    "priority": ("x-dynamo-request-priority",),
    "strict-priority": ("x-dynamo-request-strict-priority",),
    "osl": (),
    "fair-class": ("x-dynamo-meta-policy-class",),
    "policy": (),
    "session-id": (),
    "parent-session-id": (),
    "session-final": (),
    "session-ephemeral": (),
    "load-test": (),
    "worker-instance-id": ("x-worker-instance-id",),
    "dp-rank": ("x-dp-rank", "x-data-parallel-rank"),
    "prefill-instance-id": ("x-prefill-instance-id",),
    "prefill-dp-rank": ("x-prefill-dp-rank",),
}
HEADERS = {
    hint: (*(prefix + hint for prefix in HEADER_PREFIXES), *others)
    for hint, others in HINTS.items()
}
_OF_HINTS = frozenset(name for names in HEADERS.values() for name in names)
MAX_ID = 512
_NO_NVEXT, _NO_AGENT_HINTS, _NO_AGENT_CONTEXT = Nvext(), AgentHints(), AgentContext()
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")


class SessionHint(NamedTuple):
    """Session of an agent's chain of requests, and the session that spawned it."""

    id: str | None
    parent: str | None


def apply_hints(
    request: GenerateRequest, headers: Headers, nvext: Nvext | None, cache_key: str | None
) -> None:
    """Apply `nvext` and headers to the request; headers override the body."""
    nvext = nvext or _NO_NVEXT
    apply_nvext(request, nvext)
    headers = _plain(headers)
    own = {name: text for name, text in headers.items() if name in _OF_HINTS}
    tenant = headers.get("x-tenant-id")
    if tenant:
        check_name(tenant, "x-tenant-id")
        request.cache_salt = tenant
    hints = _hints(headers, own, nvext, cache_key)
    request.agent = agent_kind(headers, hints.parent_session is not None)
    generator = is_load_generator(request.agent)
    if generator or own:
        hints = replace(hints, load_test=_flag(own, "load-test", generator))
    request.hints = hints
    if own or nvext is not _NO_NVEXT:
        request.placement = _placement(own, nvext)
    request.policy = _header(own, "policy") or request.policy


def _plain(headers: Headers) -> dict[str, str]:
    """The first value of each header by its lower-case name, which is read faster."""
    found: dict[str, str] = {}
    for name, text in headers.items():
        found.setdefault(name.lower(), text)
    return found


def _hints(headers: Headers, own: Headers, nvext: Nvext, cache_key: str | None) -> Hints:
    agent = nvext.agent_hints or _NO_AGENT_HINTS
    control = nvext.session_control
    context = nvext.agent_context or _NO_AGENT_CONTEXT
    session = _session_of(headers, own)
    named = _session_in_body(nvext, context) or cache_key
    parent = session.parent or (None if session.id else context.parent_trajectory_id)
    fair_class = _header(own, "fair-class")
    if fair_class:
        check_name(fair_class, "x-kvmesh-fair-class")
    return Hints(
        priority=_clip(_int(own, "priority", agent.priority or 0), -MAX_INT),
        strict_priority=_clip(_int(own, "strict-priority", agent.strict_priority or 0)),
        latency_sensitivity=min(max(agent.latency_sensitivity or 0.0, 0.0), 1.0),
        osl=_clip(_int(own, "osl", agent.osl or 0)) or None,
        session=_checked_id(session.id or named),
        parent_session=_checked_id(parent),
        forked_from=origin_of(headers),
        session_final=_flag(own, "session-final")
        or context.trajectory_final
        or bool(control and control.action == "close"),
        fair_class=fair_class,
        ephemeral=_flag(own, "session-ephemeral") or bool(control and control.ephemeral),
    )


def _session_in_body(nvext: Nvext, context: AgentContext) -> str | None:
    """A trajectory is one chain of requests, as a session of the mesh is."""
    if nvext.session_control is not None:
        return nvext.session_control.session_id
    return context.trajectory_id or context.session_id


def _session_of(headers: Headers, own: Headers) -> SessionHint:
    """The session in the `own` hints or the headers of known harnesses; see docs/requests.md."""
    session = _header(own, "session-id")
    if session:
        return SessionHint(session, _header(own, "parent-session-id"))
    claude = headers.get("x-claude-code-session-id")
    if claude:
        return _claude(claude, headers)
    codex = headers.get("thread-id") or headers.get("session-id")
    if codex:
        return SessionHint(codex, headers.get("x-codex-parent-thread-id"))
    opencode = headers.get("x-session-id") or headers.get("x-session-affinity")
    return SessionHint(opencode, headers.get("x-parent-session-id"))


def _claude(session: str, headers: Headers) -> SessionHint:
    """Session of Claude Code, whose subagents share the session id and differ by agent id."""
    agent = headers.get("x-claude-code-agent-id")
    if not agent:
        return SessionHint(session, None)
    parent = headers.get("x-claude-code-parent-agent-id")
    return SessionHint(f"{session}/{agent}", f"{session}/{parent}" if parent else session)


def _placement(own: Headers, nvext: Nvext) -> Placement:
    constraints = nvext.routing_constraints or RoutingConstraints()
    instance = _instance(own, "worker-instance-id", nvext.backend_instance_id)
    taints = [*constraints.required_taints, *constraints.preferred_taints]
    return Placement(
        instance=instance or _instance(own, "worker-instance-id", nvext.decode_worker_id),
        rank=_rank(own, "dp-rank", nvext.dp_rank),
        exclude=constraints.exclude,
        allow=constraints.allow,
        labels=constraints.labels,
        tolerate=taints,
        taints=constraints.required_taints,
        prefer={TAINT + name: weight for name, weight in constraints.preferred_taints.items()},
        prefill=_instance(own, "prefill-instance-id", nvext.prefill_worker_id),
        prefill_rank=_rank(own, "prefill-dp-rank", nvext.prefill_dp_rank),
    )


def _instance(own: Headers, header: str, field: str | int | None) -> str | None:
    return _header(own, header) or (None if field is None else str(field))


def _rank(own: Headers, header: str, field: int | None) -> int | None:
    rank = _int(own, header, -1 if field is None else field)
    return None if rank < 0 else rank


def _clip(value: int, low: int = 0) -> int:
    return min(max(value, low), MAX_INT)


def _header(own: Headers, name: str) -> str | None:
    for header in HEADERS[name] if own else ():
        value = own.get(header)
        if value:
            return value
    return None


def unknown_headers(headers: Headers) -> list[str]:
    """The headers of hints that have no effect, since no hint has such a name."""
    names = (name.lower() for name in headers)
    return sorted(
        f"header {name}"
        for name in names
        if name.startswith(HEADER_PREFIXES) and name not in _OF_HINTS
    )


def _int(own: Headers, name: str, default: int) -> int:
    text = _header(own, name)
    if text is None:
        return default
    if not _NUMBER.fullmatch(text):
        given = next(header for header in HEADERS[name] if own.get(header))
        raise InvalidRequest(f"Header `{given}` must be an integer.", name)
    return int(text)


def _flag(own: Headers, name: str, default: bool = False) -> bool:
    text = _header(own, name)
    return default if text is None else text.lower() in ("1", "true", "yes")


def _checked_id(name: str | None) -> str | None:
    if name is not None and len(name) > MAX_ID:
        raise InvalidRequest(f"Session ids must be at most {MAX_ID} characters long.")
    return name or None


class _TurnMetadata(msgspec.Struct):
    forked_from_thread_id: str | None = None


def origin_of(headers: Headers) -> str | None:
    """The session that a session was forked from: Codex names it in the metadata of its turns.

    A fork begins with the history of its origin, and does not end with it.
    """
    metadata = headers.get("x-codex-turn-metadata")
    if not metadata:
        return None
    try:
        origin = msgspec.json.decode(metadata, type=_TurnMetadata).forked_from_thread_id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return origin if origin and len(origin) <= MAX_ID else None


class _UserId(msgspec.Struct):
    session_id: str | None = None


def session_in_user_id(user_id: str | None) -> str | None:
    """The session in Claude Code's `metadata.user_id`, which is JSON."""
    if not user_id or not user_id.startswith("{"):
        return None
    try:
        return msgspec.json.decode(user_id, type=_UserId).session_id
    except msgspec.MsgspecError:
        return None
