"""Speculative prefills go on where they pay, and stop by themselves where they do not."""

from typing import Literal

import pytest

from kvmesh.frontend.sessions.speculation_gate import (
    FIRST_TRIALS,
    MAX_FAMILIES,
    MAX_TENANTS,
    MIN_TRIALS,
    TRIAL_EVERY,
    TRIAL_TOKENS,
    FollowUp,
    FollowUpFamily,
    SpeculationGate,
    SpeculationMode,
)

FAMILY = FollowUpFamily("m", "codex", False)
Waits = Literal["tools", "user"]


def share(gate: SpeculationGate, waits: Waits, useful: int, hinted: bool = False) -> float:
    """The share of 400 answers that a speculation follows; `useful` of 100 tokens are used."""
    made = 0
    for _ in range(400):
        planned = gate.plan(FAMILY, hinted)
        if planned is not None and gate.allows(planned, waits):
            made += 1
            gate.record(FollowUp(FAMILY, waits), 100, useful)
    return made / 400


@pytest.mark.parametrize(
    ("mode", "hinted", "useful", "low", "high"),
    [
        pytest.param("auto", False, 100, 1.0, 1.0, id="from the trials on"),
        pytest.param("auto", False, 50, 0.08, 0.1, id="trials only where half is wasted"),
        pytest.param("auto", False, 0, 0.08, 0.1, id="trials only where nothing is used"),
        pytest.param("auto", True, 100, 1.0, 1.0, id="all that are hinted and pay"),
        pytest.param("auto", True, 50, 0.05, 0.08, id="hints are followed until they do not pay"),
        pytest.param("hinted", False, 100, 0.0, 0.0, id="no trials if only hints count"),
        pytest.param("hinted", True, 100, 1.0, 1.0, id="hints if only hints count"),
        pytest.param("off", True, 100, 0.0, 0.0, id="never"),
    ],
)
def test_the_share_of_answers_with_a_speculation(
    mode: SpeculationMode, hinted: bool, useful: int, low: float, high: float
) -> None:
    assert low <= share(SpeculationGate(mode), "tools", useful, hinted) <= high


def test_tools_and_people_are_judged_apart() -> None:
    gate = SpeculationGate("auto")
    share(gate, "tools", 100)
    assert share(gate, "user", 0) <= FIRST_TRIALS / 400 + 1 / TRIAL_EVERY
    planned = gate.plan(FAMILY, False)
    assert planned is not None
    assert gate.allows(planned, "tools")


def test_a_follow_up_without_missing_tokens_does_not_pay() -> None:
    gate = SpeculationGate("auto")
    for _ in range(3 * MIN_TRIALS):
        gate.record(FollowUp(FAMILY, "tools"), 0, 0)
    assert share(gate, "tools", 0) <= 0.1


def test_rare_follow_ups_have_first_trials_of_their_own() -> None:
    gate = SpeculationGate("auto")
    made = 0
    for number in range(400):
        waits: Waits = "tools" if number % 10 else "user"
        planned = gate.plan(FAMILY, False)
        if planned is not None and gate.allows(planned, waits):
            made += waits == "user"
            gate.record(FollowUp(FAMILY, waits), 100, 100 if waits == "user" else 0)
    assert made == 40


def test_a_kind_that_never_comes_is_not_awaited_forever() -> None:
    gate = SpeculationGate("auto")
    share(gate, "tools", 0)
    share(gate, "tools", 0)
    planned = [gate.plan(FAMILY, False) for _ in range(100)]
    assert sum(each is not None for each in planned) == 100 // TRIAL_EVERY


def test_trials_are_shorter_than_what_pays() -> None:
    gate = SpeculationGate("auto")
    follow_up = FollowUp(FAMILY, "user")
    assert gate.most_tokens(follow_up, 100_000) == TRIAL_TOKENS
    assert gate.most_tokens(follow_up, 100) == 100
    share(gate, "user", 100)
    assert gate.most_tokens(follow_up, 100_000) == 100_000


def test_what_stops_paying_ends_and_what_pays_again_resumes() -> None:
    gate = SpeculationGate("auto")
    share(gate, "tools", 100)
    assert share(gate, "tools", 0) < 0.1
    assert share(gate, "tools", 100) > 0.0
    for _ in range(10):
        share(gate, "tools", 100)
    assert share(gate, "tools", 100) == 1.0


def test_what_a_tenant_makes_of_speculations_concerns_no_other() -> None:
    """A tenant that wastes all of its speculations, or whose agents never come back otherwise."""
    gate = SpeculationGate("auto")
    share(gate, "tools", 100)
    hostile = FAMILY._replace(tenant="evil")
    for _ in range(400):
        gate.record(FollowUp(hostile, "tools"), 100, 0)
        gate.record(FollowUp(hostile, "user"), 100, 100)
    assert share(gate, "tools", 100) == 1.0
    assert gate.most_tokens(FollowUp(FAMILY, "user"), 100_000) == TRIAL_TOKENS
    planned = gate.plan(FAMILY, False)
    assert planned is not None
    for _ in range(FIRST_TRIALS):
        gate.allows(planned, "user")
    assert not any(gate.allows(planned, "user") for _ in range(TRIAL_EVERY - 1))
    reports = {each.about: each for each in gate.report("m")}
    assert (
        reports["codex, results of tools, without thinking"].reason == "it pays for 1 of 2 tenants"
    )
    assert len(reports) == 2


def test_the_families_of_a_tenant_are_bounded() -> None:
    gate = SpeculationGate("auto")
    for number in range(2 * MAX_FAMILIES):
        family = FollowUpFamily("m", f"agent-{number}", True, "evil")
        gate.plan(family, False)
        gate.record(FollowUp(family, "user"), 1, 1)
    assert len(list(gate.report("m"))) == MAX_FAMILIES
    assert gate.plan(FAMILY, False) is not None


def test_the_latest_tenants_are_remembered() -> None:
    gate = SpeculationGate("auto")
    for number in range(2 * MAX_TENANTS):
        gate.record(FollowUp(FollowUpFamily(f"m{number}", "", True, f"t{number}"), "user"), 1, 1)
    assert gate.models == {f"m{number}" for number in range(MAX_TENANTS, 2 * MAX_TENANTS)}
