"""Hints of requests: session headers of every harness, nvext, header values."""

from typing import Any

import pytest
from multidict import CIMultiDict
from unit.frontend.apis.bodies import headers, request

from kvmesh.frontend.apis.request_hints import session_in_user_id
from kvmesh.frontend.errors import InvalidRequest

SESSIONS = [
    (headers(), None, None),
    (headers(X_KVMesh_Session_ID="a", X_KVMesh_Parent_Session_ID="b"), "a", "b"),
    (headers(x_dynamo_session_id="a"), "a", None),
    (headers(X_Claude_Code_Session_Id="s"), "s", None),
    (headers(x_claude_code_session_id="s", x_claude_code_agent_id="x"), "s/x", "s"),
    (
        headers(
            x_claude_code_session_id="s",
            x_claude_code_agent_id="x",
            x_claude_code_parent_agent_id="p",
        ),
        "s/x",
        "s/p",
    ),
    (headers(session_id="c"), "c", None),
    (headers(session_id="c", thread_id="t", x_codex_parent_thread_id="p"), "t", "p"),
    (headers(x_session_id="o", x_parent_session_id="p"), "o", "p"),
    (headers(x_session_affinity="o"), "o", None),
]


@pytest.mark.parametrize(("head", "session", "parent"), SESSIONS)
def test_every_harness_names_its_session(
    head: CIMultiDict[str], session: str | None, parent: str | None
) -> None:
    hints = request(head).hints
    assert (hints.session, hints.parent_session) == (session, parent)


@pytest.mark.parametrize(
    ("metadata", "origin"),
    [
        ('{"turn_id":"1","forked_from_thread_id":"t-0","sandbox":"none"}', "t-0"),
        ('{"turn_id":"1","forked_from_thread_id":null}', None),
        ('{"turn_id":"1"}', None),
        ('{"forked_from_thread_id":7}', None),
        ('{"forked_from_thread_id":""}', None),
        (f'{{"forked_from_thread_id":"{"t" * 600}"}}', None),
        ("[" * 100_000, None),
        ("broken", None),
        ("", None),
    ],
)
def test_a_fork_of_codex_knows_its_origin(metadata: str, origin: str | None) -> None:
    head = headers(session_id="t-1", x_codex_turn_metadata=metadata)
    hints = request(head).hints
    assert (hints.session, hints.parent_session, hints.forked_from) == ("t-1", None, origin)


@pytest.mark.parametrize(
    ("head", "load_test"),
    [
        (headers(user_agent="aiperf/0.13.0"), True),
        (headers(user_agent="guidellm/0.8", x_session_affinity="s"), True),
        (headers(user_agent="aiperf/0.13.0", x_kvmesh_load_test="0"), False),
        (headers(user_agent="claude-cli/2.1", x_kvmesh_load_test="1"), True),
        (headers(user_agent="claude-cli/2.1"), False),
    ],
)
def test_a_request_of_a_load_generator_is_a_load_test(
    head: CIMultiDict[str], load_test: bool
) -> None:
    assert request(head).hints.load_test == load_test


def test_claude_code_s_user_id_holds_a_session() -> None:
    assert session_in_user_id('{"device_id":"d","session_id":"s"}') == "s"
    assert session_in_user_id("user_abc") is None
    assert session_in_user_id("{broken") is None


def test_headers_override_the_body() -> None:
    head = headers(
        x_kvmesh_priority="7", x_kvmesh_worker_instance_id="w", x_tenant_id="t", x_session_id="s"
    )
    nvext = {"agent_hints": {"priority": 1, "osl": 99}, "cache_salt": "x", "dp_rank": 2}
    made = request(head, nvext=nvext, prompt_cache_key="k")
    assert (made.hints.priority, made.hints.osl, made.hints.session) == (7, 99, "s")
    assert (made.placement.instance, made.placement.rank) == ("w", 2)
    assert made.cache_salt == "t"


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("x-dynamo-request-priority", "3", {"priority": 3}),
        ("x-dynamo-request-strict-priority", "2", {"strict_priority": 2}),
        ("x-dynamo-meta-policy-class", "batch", {"fair_class": "batch"}),
        ("x-worker-instance-id", "17", {"instance": "17"}),
        ("x-dynamo-worker-instance-id", "17", {"instance": "17"}),
        ("x-dp-rank", "1", {"rank": 1}),
        ("x-data-parallel-rank", "1", {"rank": 1}),
        ("x-prefill-instance-id", "18", {"prefill": "18"}),
        ("x-dynamo-prefill-instance-id", "18", {"prefill": "18"}),
        ("x-prefill-dp-rank", "1", {"prefill_rank": 1}),
        ("x-dynamo-prefill-dp-rank", "1", {"prefill_rank": 1}),
    ],
)
def test_the_headers_of_dynamo_are_hints(name: str, value: str, hint: dict[str, Any]) -> None:
    made = request(CIMultiDict({name: value}), nvext={"extra_fields": ["ignored"]})
    (field,) = hint
    holder = made.hints if hasattr(made.hints, field) else made.placement
    assert getattr(holder, field) == hint[field]
    assert made.ignored == []


def test_workers_are_named_in_the_body() -> None:
    nvext = {"decode_worker_id": 5, "prefill_worker_id": 6, "prefill_dp_rank": 1}
    placement = request(nvext=nvext).placement
    assert (placement.instance, placement.prefill, placement.prefill_rank) == ("5", "6", 1)
    assert request(nvext=nvext).steers_routing


def test_a_session_is_ephemeral_by_header_or_body() -> None:
    control = {"session_id": "s", "ephemeral": True}
    assert request(nvext={"session_control": control}).hints.ephemeral
    assert request(headers(x_kvmesh_session_ephemeral="true")).hints.ephemeral
    assert not request(headers(x_kvmesh_session_ephemeral="0")).hints.ephemeral
    assert not request().hints.ephemeral


def test_a_trajectory_is_a_session() -> None:
    context = {"session_type_id": "research", "session_id": "run", "trajectory_id": "run:a"}
    child = {**context, "parent_trajectory_id": "run:p", "trajectory_final": True}
    hints = request(nvext={"agent_context": child}, prompt_cache_key="k").hints
    assert (hints.session, hints.parent_session, hints.session_final) == ("run:a", "run:p", True)
    hints = request(nvext={"agent_context": {"session_id": "run"}}).hints
    assert (hints.session, hints.parent_session, hints.session_final) == ("run", None, False)
    hints = request(headers(x_session_id="s"), nvext={"agent_context": child}).hints
    assert (hints.session, hints.parent_session, hints.session_final) == ("s", None, True)


@pytest.mark.parametrize("name", ["x-kvmesh-priority", "x-dynamo-request-priority"])
def test_an_invalid_header_is_named_as_it_was_sent(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        request(CIMultiDict({name: "high"}))


BAD_NAMES = ["x" * 129, "a b", "a\tb", "\u00e4", "a\x1fb"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_given_by_callers_are_validated(name: str) -> None:
    with pytest.raises(InvalidRequest, match="visible ASCII"):
        request(nvext={"cache_salt": name})
    for header in ("x-tenant-id", "x-kvmesh-fair-class"):
        with pytest.raises(InvalidRequest, match=header):
            request(CIMultiDict({header: name}))
