"""Sums of sessions and tenants over a sliding window, in bounded memory."""

import pytest

from kvmesh.bus.messages import CacheAccount, CacheLoss, Outcome, PromptChange
from kvmesh.observer.activity import Activities, by_session, by_tenant

WINDOW_S = 300.0
NOW = 1_000_000.0


def outcome(tenant: str = "red", session: str = "s1", **fields: object) -> Outcome:
    facts: dict[str, object] = {
        "request": "r1",
        "instance": "worker-0-1",
        "time": NOW,
        "cached_tokens": 60,
        "output_tokens": 10,
        "ttft_s": 0.5,
        "total_s": 1.0,
        "finish": "stop",
        "prompt_tokens": 100,
        "tenant": tenant,
        "session": f"tag\x1f{session}",
        **fields,
    }
    return Outcome(**facts)  # type: ignore[arg-type]


def lossy(tokens: int, reason: str) -> CacheAccount:
    losses = [CacheLoss(first=60, tokens=tokens, reason=reason)]
    return CacheAccount(prompt_tokens=100, own=60, new=40 - tokens, possible=90, losses=losses)


def test_sums_of_a_session() -> None:
    sessions = by_session(WINDOW_S)
    sessions.add(outcome(cache=lossy(30, "evicted"), wait_s=0.5), NOW)
    sessions.add(outcome(cache=lossy(10, "diverged"), finish="error", ttft_s=None), NOW + 1)
    sessions.add(outcome(choice=1, prompt_tokens=0, ttft_s=0.1), NOW + 2)
    (row,) = sessions.rows(NOW + 2)
    assert (row.tenant, row.session, row.requests, row.errors) == ("red", "s1", 2, 1)
    assert (row.prompt_tokens, row.output_tokens, row.queue_s) == (200, 30, 0.5)
    assert (row.reused, row.possible, row.ttft_s) == (0.6, 0.9, 0.5)
    assert (row.lost_tokens, row.lost_for, row.last_seen) == (40, "evicted", NOW + 2)


def test_times_that_are_no_numbers_do_not_spoil_the_sums() -> None:
    tenants = by_tenant(WINDOW_S)
    for bad in (float("nan"), float("inf")):
        tenants.add(outcome(ttft_s=bad, wait_s=bad), NOW)
    tenants.add(outcome(wait_s=2.0), NOW)
    (row,) = tenants.rows(NOW)
    assert (row.requests, row.ttft_s, row.queue_s) == (3, 0.5, 2.0)


def test_requests_leave_the_sums_with_the_window() -> None:
    tenants = by_tenant(WINDOW_S)
    tenants.add(outcome(cache=lossy(30, "evicted")), NOW)
    tenants.add(outcome(cache=lossy(5, "diverged")), NOW + 200)
    (row,) = tenants.rows(NOW + 200)
    assert row.requests == 2
    assert row.requests_per_min == pytest.approx(0.4)
    (row,) = tenants.rows(NOW + WINDOW_S + 15)
    assert (row.requests, row.lost_tokens, row.lost_for) == (1, 5, "diverged")
    assert tenants.rows(NOW + 2 * WINDOW_S) == []


def test_the_prompt_that_moves_is_named() -> None:
    sessions = by_session(WINDOW_S)
    change = PromptChange(token=9, part="system", way="changed", turns=4)
    sessions.add(outcome(cache=CacheAccount(prompt_tokens=100, change=change)), NOW)
    (row,) = sessions.rows(NOW)
    assert row.moving == "system prompt changed, 4 turns"
    sessions.add(outcome(cache=CacheAccount(prompt_tokens=100)), NOW)
    assert sessions.rows(NOW)[0].moving == ""


def test_a_session_waits_for_what_its_last_answer_awaits() -> None:
    sessions = by_session(WINDOW_S)
    sessions.add(outcome(waits_for=["tool", "Bash", "ls"]), NOW)
    sessions.add(outcome(waits_for=["human"]), NOW + 1)
    assert [row.waits_for for row in sessions.rows(NOW + 1)] == ["user"]


def test_sessions_of_two_tenants_stay_apart() -> None:
    sessions = by_session(WINDOW_S)
    for tenant in ("red", "blue"):
        sessions.add(outcome(tenant), NOW)
    assert {(row.tenant, row.session) for row in sessions.rows(NOW)} == {
        ("red", "s1"),
        ("blue", "s1"),
    }


def test_the_longest_unseen_group_is_forgotten_first() -> None:
    groups = Activities(WINDOW_S, 2, lambda outcome: (outcome.tenant, ""))
    for tenant in ("a", "b", "a", "c"):
        groups.add(outcome(tenant), NOW)
    assert {row.tenant for row in groups.rows(NOW)} == {"a", "c"}
