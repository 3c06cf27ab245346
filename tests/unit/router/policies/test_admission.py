"""Admission of agents: who rests, who resumes, and where."""

from collections.abc import Iterator
from math import exp, inf
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from support.routing import request, sequence, worker

from kvmesh.bus.messages import (
    Decision,
    Hints,
    Outcome,
    Placement,
    Refused,
    RouteRequest,
    SeqFree,
    ToolEvent,
)
from kvmesh.returns.forecaster import ReturnChance
from kvmesh.returns.tool_calls import ReportedTools
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.policies.active_agents import (
    MAX_AGENTS,
    MAX_ID_LENGTH,
    ActiveAgents,
    AgentState,
)
from kvmesh.router.policies.admission import MAX_SUBAGENTS, AgentAdmission
from kvmesh.router.policies.base import Kv
from kvmesh.router.returns_report import returns_report
from kvmesh.router.waiting.queue import PlacementQueue
from kvmesh.router.waiting.resting import ASK_AGAIN_S
from kvmesh.router.waiting.ticket import Ticket
from kvmesh.settings.schema import RouterSettings

SHARE = 0.9  # of 1,024 blocks: 921


def core(*names: str, share: float = SHARE, **settings: Any) -> tuple[RouterCore, AgentAdmission]:
    """A router whose window has a share of the memory of its workers."""
    options = {"predicted_ttl_s": 0.0, "forecast_returns": False, **settings}
    router = RouterCore("m", "r", RouterSettings(**options), Random(7))
    for name in names or ("a",):
        router.join(worker(name))
    policy = router.policies.default
    assert isinstance(policy, AgentAdmission)
    policy.agents.table = router.table
    policy.window.share = share
    policy.window.observe_pause(10**9, 0.1, 10.0, 0.0)  # short pauses: contexts are worth keeping
    return router, policy


def turn(
    agent: str,
    hundreds: int,
    number: int = 0,
    to: str | None = None,
    deadline_s: float = 9999.0,
    **hints: Any,
) -> RouteRequest:
    own = 1000 * (ord(agent[0]) + 1)
    return request(
        f"{agent}{number}",
        sequence(*range(own, own + 100 * hundreds)),
        hints=Hints(session=agent, **hints),
        placement=Placement(instance=to),
        deadline_s=deadline_s,
    )


def start(router: RouterCore, message: RouteRequest, now: float = 0.0) -> Decision:
    decision = router.decide(message, None, now)
    router.commit(decision, now)
    router.learn(decision, now)
    return decision


def end(router: RouterCore, request_id: str, now: float, cached: int = 0, output: int = 0) -> None:
    outcome = Outcome(
        request=request_id, instance="a", time=now, cached_tokens=cached, output_tokens=output,
        ttft_s=0.1, total_s=1.0, finish="stop", waits_for=["tool", "Bash"],
    )  # fmt: skip
    router.apply_route_event(outcome, now)
    router.learn(outcome, now)


def admitted(policy: AgentAdmission, agents: str, now: float, hundreds: int = 1) -> str:
    return "".join(a for a in agents if policy.admits(turn(a, hundreds, 9), now))


def test_kv_admits_agents_unless_a_setting_turns_it_off() -> None:
    router = RouterCore("m", "r", RouterSettings(admit_agents=False), Random(0))
    assert type(router.policies.default) is Kv


def test_everybody_is_admitted_while_the_window_is_open() -> None:
    router, policy = core(share=inf)
    for agent in "uvwxyz":
        start(router, turn(agent, 4))
        end(router, f"{agent}0", 1.0)
    policy.tick(5.0)
    assert admitted(policy, "uvwxyzn", 6.0, 9) == "uvwxyzn"


def test_turns_whose_contexts_were_evicted_shut_the_window() -> None:
    router, policy = core(share=inf)
    now = 0.0
    for number in range(8):
        for agent in "wxyz":
            start(router, turn(agent, 4, number), now)
            end(router, f"{agent}{number}", now + 0.5)
        now += 1.0
        policy.tick(now)
    assert not policy.window.open, "no rank ever held a prompt again"


@pytest.mark.parametrize(("found", "open_"), [(0.0, False), (1.0, True)])
def test_contexts_evicted_between_placement_and_start_shut_the_window(
    found: float, open_: bool
) -> None:
    """A rank holds the prompt when the router places it, and may not when its engine starts it."""
    router, policy = core(share=inf, predicted_ttl_s=600.0)
    now = 0.0
    for number in range(8):
        for agent in "wx":
            decision = start(router, turn(agent, 4, number, "a"), now)
            router.apply_route_event(decision, now)  # as the stream brings it back
            held = sum(decision.chosen.overlap) * decision.block_size
            assert bool(held) == bool(number)
            end(router, f"{agent}{number}", now + 0.5, int(found * held), 1)
        now += 1.0
        policy.tick(now)
    assert policy.window.open == open_


def test_past_the_window_agents_rest_between_turns_the_longest_tool_first() -> None:
    router, policy = core()
    for agent, ended in (("u", 1.0), ("v", 3.0), ("w", 2.0), ("x", 4.0)):  # 1,000 of 921 blocks
        start(router, turn(agent, 2 + (agent == "x") + (agent == "w")))
        end(router, f"{agent}0", ended)
    policy.tick(5.0)
    assert admitted(policy, "vwx", 5.1, 2) == "vwx"


def test_the_session_rests_whose_tool_is_reported_to_run_for_long() -> None:
    router, policy = core(forecast_returns=True)
    for agent in "wxy":
        start(router, turn(agent, 4))
    for agent in "wxy":
        end(router, f"{agent}0", 1.0)
    for agent, remaining in (("w", 1.0), ("x", 300.0), ("y", 2.0)):
        router.learn(
            ToolEvent(session=agent, call="c", event="started", time=1.5, remaining_s=remaining),
            1.5,
        )
    policy.tick(2.0)
    assert [session for session, agent in policy.agents if not agent.active] == ["x"]


@pytest.mark.parametrize(
    "reports",
    [
        {},
        {"evil\x1fu": 0.0, "evil\x1fv": 0.0},
        {"evil\x1fu": 3600.0, "evil\x1fv": 0.0},
        {"evil\x1fu": 0.0, "evil\x1fv": 3600.0},
    ],
)
def test_by_reports_a_tenant_chooses_only_which_of_its_own_agents_rest(
    reports: dict[str, float],
) -> None:
    router, policy = core(forecast_returns=True)
    agents = {"u": "evil", "x": "other", "v": "evil", "y": "other"}
    for number, (agent, tenant) in enumerate(agents.items()):
        message = turn(agent, 4, tenant=tenant)
        session = f"{tenant}\x1f{agent}"
        start(router, replace(message, hints=replace(message.hints, session=session)))
        end(router, f"{agent}0", 1.0 + 0.01 * number)
    for session, remaining in reports.items():
        event = ToolEvent(session=session, event="started", time=1.5, remaining_s=remaining)
        router.learn(event, 1.5)
    policy.tick(2.0)
    resting = sorted(session for session, agent in policy.agents if not agent.active)
    evil = max(reports, key=lambda session: reports[session], default="evil\x1fu")
    assert resting == [evil, "other\x1fx"]


class ReportedReturns:
    """A report says that every session is back at once."""

    def __init__(self) -> None:
        self.tools = ReportedTools()
        self.tools.apply(ToolEvent(session="s", event="started", time=0.0, remaining_s=0.0))

    def within(self, session: str, seconds: float, now: float) -> ReturnChance | None:
        return ReturnChance(0.1, 1.0)


def test_beside_other_tenants_a_report_keeps_no_place() -> None:
    _, policy = core()
    agents = policy.agents
    agents.break_even_s = 4.0
    agents.returns = ReportedReturns()
    for tenant in ("evil", "other"):
        session = f"{tenant}\x1fs"
        hints = Hints(session=session, tenant=tenant)
        placed = start(core()[0], request(tenant, sequence(1), hints=hints))
        agents.placed(placed, False, 0.0)
        agents.freed(tenant, 1.0)
    agents.drop_gone(2.0)
    evil, other = (agents.find(f"{tenant}\x1fs") for tenant in ("evil", "other"))
    assert evil is not None
    assert other is not None
    assert agents.presence("evil\x1fs", evil, 5.0) == pytest.approx(exp(-1.0))
    agents.drop_gone(30.0)
    assert not evil.active
    assert not other.active


def test_tokens_that_agents_share_count_once() -> None:
    router, policy = core(share=0.95)
    for number, agent in enumerate("uvwx"):  # 600 blocks in common, 90 of each: 960 of 972
        own = range(8000 + 100 * number, 8090 + 100 * number)
        blocks = sequence(*range(7000, 7600), *own)
        start(router, request(f"{agent}0", blocks, hints=Hints(session=agent)))
    policy.tick(1.0)
    for agent in "uvwx":
        end(router, f"{agent}0", 1.0)
    assert admitted(policy, "uvwx", 1.1) == "uvwx"


def test_an_agent_with_a_request_rests_at_its_end() -> None:
    router, policy = core()
    for agent, hundreds in (("v", 2), ("w", 4), ("x", 4)):
        start(router, turn(agent, hundreds))
    policy.tick(5.0)
    end(router, "v0", 6.0)
    assert admitted(policy, "vwx", 6.1, 2) == "wx", "the smallest context leaves"


def test_a_resting_agent_resumes_where_there_is_room() -> None:
    router, policy = core("a", "b")
    for agent, hundreds, to in (("v", 2, "a"), ("w", 4, "a"), ("x", 4, "a"), ("y", 5, "b")):
        start(router, turn(agent, hundreds, to=to))
    policy.tick(5.0)
    end(router, "v0", 5.5)
    assert admitted(policy, "n", 5.6, 5) == ""
    end(router, "y0", 6.0)
    policy.tick(60.0)  # the tool of y runs for long
    assert policy.admits(turn("n", 5, 9), 60.1)
    decision = router.decide(turn("n", 5, 9), None, 60.1)
    assert decision.chosen.instance == "b"
    assert decision.note == "rested 54.5 s for a place among the active agents"
    assert policy.rests["room"] == 1


def test_agents_without_requests_leave_when_they_are_not_expected_soon() -> None:
    router, policy = core()
    for agent in "wx":
        start(router, turn(agent, 5))
        end(router, f"{agent}0", 1.0)
    assert admitted(policy, "n", 1.5, 5) == ""
    policy.tick(30.0)
    assert policy.active == 0
    assert admitted(policy, "n", 31.0, 5) == "n"


def test_a_context_beyond_the_window_runs_where_no_other_agent_is_active() -> None:
    router, policy = core(share=0.5)
    start(router, turn("w", 4))
    assert not policy.admits(turn("n", 7), 1.0)
    end(router, "w0", 1.5)
    policy.tick(40.0)
    assert policy.admits(turn("n", 7), 40.5)


def test_memory_of_prefill_workers_holds_no_agent() -> None:
    router, policy = core("a")
    router.join(worker("p", serves="prefill"))
    for agent in "wx":
        start(router, turn(agent, 4))
    assert not policy.admits(turn("n", 5), 1.0)


def test_the_nearest_deadline_of_an_agents_requests_ends_its_rest() -> None:
    router, policy = core()
    for agent in "wx":
        start(router, turn(agent, 5))
    patient, hasty = turn("n", 5, 0, deadline_s=60.0), turn("n", 5, 1, deadline_s=20.0)
    assert not policy.admits(patient, 1.0)
    assert not policy.admits(hasty, 2.0)
    assert not policy.admits(patient, 16.5)
    assert policy.admits(hasty, 17.0)


def test_with_other_owners_a_rest_does_not_skip_the_queue() -> None:
    router, policy = core()
    for agent, tenant in (("w", "crowd"), ("x", "crowd"), ("y", "other")):
        start(router, turn(agent, 3 if tenant == "other" else 4, tenant=tenant))
    late = turn("n", 5, tenant="crowd", deadline_s=10.0)
    assert not policy.admits(late, 1.0)
    assert policy.admits(late, 6.0)
    assert policy.queue_boost_s(late) == 0.0


def test_nobody_rests_where_pauses_are_longer_than_computing_a_context() -> None:
    router, policy = core()
    policy.window.observe_pause(10**10, 30.0, 10.0, 0.0)
    for agent in "wx":
        start(router, turn(agent, 5))
    assert not policy.admits(turn("n", 5), 1.0)
    policy.tick(1.5)
    assert policy.window.open
    assert policy.admits(turn("n", 5), 1.6)


def test_nobody_rests_where_engines_compute_their_memory_in_no_time() -> None:
    router, policy = core()
    router.speeds.prefill_rate = 1e6
    policy.tick(1.0)
    assert policy.window.open


def test_requests_without_a_session_never_rest() -> None:
    router, policy = core()
    for agent in "wx":
        start(router, turn(agent, 5))
    assert policy.admits(request("plain", b"", tokens=9), 1.0)
    endless = Hints(session="s" * (MAX_ID_LENGTH + 1))
    assert policy.admits(request("long", sequence(1), hints=endless), 1.0)


def test_a_subagent_goes_with_its_parent_that_waits() -> None:
    router, policy = core()
    for agent in "wx":
        start(router, turn(agent, 5))
    end(router, "w0", 0.9)
    assert not policy.admits(turn("n", 5, parent_session="z"), 1.0)
    assert not policy.admits(turn("r", 5, parent_session="x"), 1.0)  # it has a request of its own
    assert policy.admits(turn("s", 5, parent_session="w"), 1.0)
    assert policy.admits(turn("t", 5, parent_session="s"), 1.0)


def test_a_parent_takes_a_bounded_number_of_subagents_along() -> None:
    """A caller could name the same parent for all of its sessions."""
    router, policy = core()
    for agent in "wx":
        start(router, turn(agent, 5))
    end(router, "w0", 0.9)
    children = [chr(ord("a") + number) for number in range(2 * MAX_SUBAGENTS)]
    assert policy.admits(turn("a", 1, parent_session="w"), 1.0)
    parents = {child: "wa"[number % 2] for number, child in enumerate(children)}
    along = [c for c in children if policy.admits(turn(c, 1, parent_session=parents[c]), 1.0)]
    assert along == children[:MAX_SUBAGENTS]
    start(router, turn("a", 1, parent_session="w"), 1.1)
    end(router, "a0", 1.2)
    first = policy.agents.find("a")
    assert first is not None
    policy.agents.rest(first)
    assert policy.admits(turn(children[-1], 1, parent_session="w"), 1.3)


def test_subagents_beyond_the_share_of_their_owner_rest_as_others() -> None:
    router, policy = core()
    start(router, turn("w", 1, tenant="crowd"))
    end(router, "w0", 0.9)
    start(router, turn("x", 4, tenant="other"))
    hints: dict[str, Any] = {"tenant": "crowd", "parent_session": "w"}
    assert policy.admits(turn("a", 3, **hints), 1.0)
    start(router, turn("a", 3, **hints), 1.0)
    assert not policy.admits(turn("b", 3, **hints), 1.5)


@pytest.mark.parametrize(("deadline_s", "until"), [(60.0, 55.0), (2.0, 1.0)])
def test_a_rest_ends_before_the_request_would_be_refused(deadline_s: float, until: float) -> None:
    router, policy = core(queue_threshold=0.1)
    queue = PlacementQueue(router, "r")
    for agent in "wx":
        start(router, turn(agent, 5))
    crowded = Ticket(request("plain", sequence(1), deadline_s=deadline_s), 0.0)
    resting = Ticket(turn("n", 5, deadline_s=deadline_s), 0.0)
    for ticket in (crowded, resting):
        for event in queue.submit(ticket, 0.0).events:
            queue.apply(event, 0.0)
    assert len(policy.waiting) == 1
    assert queue.place_ready(until - 0.1).done == []
    assert queue.place_ready(until).done == [resting], "past the queue, in which others wait"
    assert isinstance(resting.result, Decision)
    assert (len(policy.waiting), policy.rests["deadline"]) == (0, 1)
    assert queue.expire(deadline_s).done == [crowded]
    assert isinstance(crowded.result, Refused)


def test_an_agent_that_rested_is_not_gathered_until_the_next_check() -> None:
    router, policy = core(gather_s=0.001)
    queue = PlacementQueue(router, "r")
    for agent in "wx":
        start(router, turn(agent, 5))
    resting = Ticket(turn("n", 5), 0.0)
    queue.submit(resting, 0.0)
    for agent in "wx":
        router.apply(SeqFree(f"{agent}0"), 0.5)
    policy.window.share = inf
    assert queue.place_ready(1.0).done == [resting]
    assert queue.waiting == 0


def test_asking_whether_many_may_be_admitted_takes_a_bounded_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, policy = core()
    queue = PlacementQueue(router, "r")
    for agent in "wx":
        start(router, turn(agent, 5))
    for number in range(100):
        queue.submit(Ticket(turn("n", 5, number), 0.0), 0.0)
    assert queue.waiting == 100
    asked = []

    def admits(request: RouteRequest, now: float) -> bool:
        asked.append(now)
        return False

    monkeypatch.setattr(policy, "admits", admits)
    for step in range(100):  # events of a tenth of a second
        queue.place_ready(1.0 + 0.001 * step)
    assert len(asked) < 0.1 / ASK_AGAIN_S + 2 * 100


def test_before_a_rest_ends_an_agent_leaves_that_had_its_time() -> None:
    router, policy = core()
    start(router, turn("w", 4), 0.0)
    start(router, turn("x", 4), 30.0)
    assert not policy.admits(turn("n", 3, deadline_s=60.0), 1.0)
    policy.tick(39.0)
    leaving = [s for s, agent in policy.agents if agent.leaving]
    assert leaving == []
    policy.tick(42.0)
    assert [s for s, agent in policy.agents if agent.leaving] == ["w"]
    end(router, "w0", 45.0)
    assert policy.admits(turn("n", 3, deadline_s=60.0), 45.3)


def test_an_owner_within_its_share_never_rests_for_the_agents_of_another() -> None:
    router, policy = core()
    for agent in "uvwx":  # the crowd of one tenant fills the memory
        start(router, turn(agent, 3, tenant="crowd"))
        end(router, f"{agent}0", 1.0)
    assert not policy.admits(turn("y", 3, 9, tenant="crowd"), 1.5)
    assert policy.admits(turn("n", 3, 9, tenant="other"), 1.5)
    start(router, turn("n", 3, 9, tenant="other"), 1.5)
    end(router, "n9", 1.6)
    policy.tick(2.0)
    other = policy.agents.find("n")
    assert other is not None
    assert other.active
    assert policy.active < 5


def test_the_only_agent_of_an_owner_rests_for_no_other_owner_whatever_its_size() -> None:
    """Among many owners its context exceeds a share, and it would rest until its deadline."""
    router, policy = core()
    for agent in "abcd":
        start(router, turn(agent, 2, tenant="crowd"))
    for agent in "efghi":
        start(router, turn(agent, 1, tenant=f"t{agent}"))
    assert not policy.admits(turn("x", 3, tenant="crowd"), 1.0)
    assert policy.admits(turn("y", 3, tenant="other"), 1.0)
    assert not policy.admits(turn("z", 3, tenant="other"), 1.0)


def test_agents_are_looked_through_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    router, policy = core(*"abcdef")
    for rank, agents in zip("abcdef", ("ab", "cd", "ef", "gh", "ij", "kl"), strict=True):
        for agent in agents:
            start(router, turn(agent, 6, to=rank))
    passes = []
    agents_of = ActiveAgents.__iter__

    def count(agents: ActiveAgents) -> Iterator[tuple[str, AgentState]]:
        passes.append(1)
        return agents_of(agents)

    monkeypatch.setattr(ActiveAgents, "__iter__", count)
    policy.tick(1.0)
    assert len(passes) < 6
    assert sum(agent.leaving for _, agent in policy.agents) == 6


def test_operators_see_who_rests_and_for_how_long() -> None:
    router, policy = core()
    for agent in "wx":
        start(router, turn(agent, 4))
    start(router, turn("m", 1, tenant="t"))
    assert not policy.admits(turn("n", 5, tenant="t", deadline_s=60.0), 1.0)
    (report,) = returns_report([router], 13.0).agents
    assert (report.active, report.window) == (3, SHARE)
    assert [(r.session, r.owner, r.rested_s, r.ends_in_s) for r in report.resting] == [
        ("n", "t", 12.0, 43.0)
    ]


def test_a_withdrawn_request_leaves_no_agent_waiting() -> None:
    router, policy = core()
    for agent in "wx":
        start(router, turn(agent, 5))
    assert not policy.admits(turn("n", 5, deadline_s=10.0), 1.0)
    policy.tick(20.0)
    assert len(policy.waiting) == 0


def test_an_admitted_request_that_is_never_placed_keeps_no_place() -> None:
    _, policy = core(share=inf)
    assert policy.admits(turn("n", 5), 1.0)
    policy.tick(20.0)
    assert policy.active == 1
    policy.tick(62.0)
    assert policy.active == 0


def test_a_freed_request_without_an_outcome_ends() -> None:
    router, policy = core()
    start(router, turn("v", 2))
    start(router, turn("v", 2, 1))
    router.apply(SeqFree("v0"), 1.0)
    end(router, "v0", 1.5)
    policy.tick(60.0)
    assert policy.active == 1, "another of its requests runs"
    router.apply(SeqFree("v1"), 60.0)
    policy.tick(120.0)
    assert policy.active == 0


def test_a_session_that_ends_leaves_its_place() -> None:
    router, policy = core()
    start(router, turn("v", 2, session_final=True))
    end(router, "v0", 1.0)
    assert policy.active == 0


def test_the_number_of_agents_is_bounded() -> None:
    _, policy = core()
    for number in range(MAX_AGENTS + 10):
        hints = Hints(session=f"s{number}")
        policy.admits(request(f"r{number}", b"", tokens=9, hints=hints), 0.0)
    assert len(policy.agents) == MAX_AGENTS


def test_replicas_that_read_the_same_stream_agree() -> None:
    (first, a), (second, b) = core(share=inf), core(share=inf)
    now = 0.0
    for number in range(8):
        for agent in "wxyz":
            decision = start(first, turn(agent, 4, number), now)
            second.apply_route_event(decision, now)
            for router in (first, second):
                end(router, f"{agent}{number}", now + 0.5)
        now += 1.0
        a.tick(now)
        b.tick(now)
    assert a.window.share == b.window.share < inf
    assert admitted(a, "wxyz", now + 0.1, 4) == admitted(b, "wxyz", now + 0.1, 4)
