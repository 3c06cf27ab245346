"""Program policy: agents pause, are demoted and resume within bounds."""

import math
from random import Random
from typing import Any

import pytest
from support.routing import request, sequence, worker

from kvmesh.bus.messages import (
    Decision,
    Hints,
    Outcome,
    Placement,
    Refused,
    RouteRequest,
    SeqFree,
)
from kvmesh.router.placement.queue import PlacementQueue
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.placement.ticket import Ticket
from kvmesh.router.policies.program import ProgramPolicy
from kvmesh.settings.schema import RouterSettings


def core(*names: str, **settings: Any) -> tuple[RouterCore, ProgramPolicy]:
    options = {"policy": "program", "predicted_ttl_s": 0.0, "program_acting_tau_s": 1000.0}
    router = RouterCore("m", "r", RouterSettings(**{**options, **settings}), Random(7))
    for name in names or ("a",):
        router.join(worker(name))
    assert isinstance(router.policies.default, ProgramPolicy)
    return router, router.policies.default


def turn(
    agent: str, hundreds: int, number: int = 0, to: str | None = None, deadline_s: float = 9999.0
) -> RouteRequest:
    own = 1000 * (ord(agent[0]) + 1)
    return request(
        f"{agent}{number}",
        sequence(*range(own, own + 100 * hundreds)),
        hints=Hints(session=agent),
        placement=Placement(instance=to),
        deadline_s=deadline_s,
    )


def start(router: RouterCore, message: RouteRequest, now: float = 0.0) -> Decision:
    assert router.policies.default.admits(message, now)
    decision = router.decide(message, None, now)
    router.commit(decision, now)
    return decision


def end(router: RouterCore, request_id: str, now: float) -> None:
    router.apply_route_event(
        Outcome(
            request=request_id, instance="a", time=now, cached_tokens=0, output_tokens=0,
            ttft_s=0.1, total_s=1.0, finish="stop",
        ),
        now,
    )  # fmt: skip


def admitted(policy: ProgramPolicy, agents: str, now: float, hundreds: int = 1) -> str:
    return "".join(a for a in agents if policy.admits(turn(a, hundreds, 9), now))


def test_all_agents_are_admitted_while_capacity_lasts() -> None:
    router, policy = core()
    for agent in "xyz":
        start(router, turn(agent, 3))
        end(router, f"{agent}0", 1.0)
    policy.tick(5.0)
    assert admitted(policy, "xyz", 6.0) == "xyz"


def test_past_the_threshold_the_smallest_acting_agents_pause() -> None:
    router, policy = core()
    for agent, hundreds in (("u", 1), ("v", 2), ("w", 3), ("x", 4)):  # 1,000 of 1,024 blocks
        start(router, turn(agent, hundreds))
    for agent in "uvx":
        end(router, f"{agent}0", 1.0)
    policy.tick(5.0)
    # Down to 819: u and v, 300 together, are enough.
    assert admitted(policy, "uvx", 6.0) == "x"


def test_tokens_that_agents_share_count_once() -> None:
    router, policy = core()
    for number, agent in enumerate("uvwx"):  # 600 blocks in common, 90 of each: 960 of 1,024
        own = range(8000 + 100 * number, 8090 + 100 * number)
        blocks = sequence(*range(7000, 7600), *own)
        start(router, request(f"{agent}0", blocks, hints=Hints(session=agent)))
        end(router, f"{agent}0", 1.0)
    policy.tick(5.0)
    assert admitted(policy, "uvwx", 6.0) == "uvwx"


def test_a_reasoning_agent_pauses_at_its_next_tool_boundary() -> None:
    router, policy = core()
    for agent, hundreds in (("v", 2), ("w", 4), ("x", 4)):
        start(router, turn(agent, hundreds))
    policy.tick(5.0)
    assert admitted(policy, "v", 5.5) == "v", "it is in the middle of something"
    end(router, "v0", 6.0)
    assert admitted(policy, "vwx", 7.0) == "wx"


def test_paused_agents_resume_where_they_fit_best() -> None:
    router, policy = core("a", "b")
    for agent, hundreds, to in (("v", 2, "a"), ("w", 4, "a"), ("x", 4, "a"), ("y", 5, "b")):
        start(router, turn(agent, hundreds, to=to))
    end(router, "v0", 1.0)
    policy.tick(5.0)
    assert admitted(policy, "v", 5.5) == ""
    policy.tick(10.0)  # a has 870 - 800 blocks of room, b 870 - 500
    assert admitted(policy, "v", 10.5) == "v"
    decision = router.decide(turn("v", 2, 1), None, 10.5)
    assert (decision.chosen.instance, decision.note) == ("b", "resumed where it fits best")


def test_a_pause_has_an_upper_bound() -> None:
    router, policy = core(program_resume_s=60.0)
    for agent, hundreds in (("v", 2), ("w", 4), ("x", 4)):
        start(router, turn(agent, hundreds))
    end(router, "v0", 1.0)
    policy.tick(5.0)
    assert admitted(policy, "v", 6.0) == ""
    for now in range(10, 65, 5):
        policy.tick(float(now))
    assert admitted(policy, "v", 65.9) == ""
    assert admitted(policy, "v", 66.0) == "v"


def test_agents_past_the_demotion_share_are_demoted_in_the_queue() -> None:
    router, policy = core()
    for agent, hundreds in (("v", 2), ("w", 3), ("x", 4)):  # 900 of 1,024 blocks
        start(router, turn(agent, hundreds))
    policy.tick(5.0)
    shifts = {agent: policy.queue_boost_s(turn(agent, 1)) for agent in "vwx"}
    assert shifts == {"v": -2.0, "w": 0.0, "x": 0.0}


def test_new_agents_wait_while_every_rank_is_full() -> None:
    router, policy = core()
    for agent, hundreds in (("w", 5), ("x", 5)):
        start(router, turn(agent, hundreds))
    assert admitted(policy, "n", 1.0) == ""
    assert policy.admits(request("plain", b"", tokens=9), 1.0), "no session, no admission"
    for agent in "wx":
        end(router, f"{agent}0", 2.0)
    policy.tick(3000.0)  # the tools run for long: their weight is gone
    assert admitted(policy, "n", 3001.0) == "n"


def test_a_paused_agents_request_waits_in_the_queue() -> None:
    router, policy = core(queue_threshold=0.0)
    dispatcher = PlacementQueue(router, "r")
    for agent, hundreds in (("w", 5), ("x", 5)):
        start(router, turn(agent, hundreds))
    ticket = Ticket(turn("n", 1), 1.0)
    assert dispatcher.submit(ticket, 1.0).done == []
    assert dispatcher.waiting == 1
    end(router, "w0", 2.0)
    policy.tick(3000.0)
    steps = dispatcher.place_ready(3000.0)
    assert steps.done == [ticket]
    assert isinstance(ticket.result, Decision)


@pytest.mark.parametrize(("deadline_s", "until"), [(60.0, 55.0), (2.0, 1.0)])
def test_a_pause_ends_before_the_request_would_be_refused(deadline_s: float, until: float) -> None:
    router, _ = core(queue_threshold=0.1, gather_s=0.0)
    dispatcher = PlacementQueue(router, "r")
    for agent in "wx":
        start(router, turn(agent, 5))
    crowded = Ticket(request("plain", sequence(1), deadline_s=deadline_s), 0.0)
    paused = Ticket(turn("n", 1, deadline_s=deadline_s), 0.0)
    for ticket in (crowded, paused):
        for event in dispatcher.submit(ticket, 0.0).events:
            dispatcher.apply(event, 0.0)
    assert dispatcher.place_ready(until - 0.1).done == []
    assert dispatcher.place_ready(until).done == [paused], "past the queue, in which others wait"
    assert isinstance(paused.result, Decision)
    assert dispatcher.expire(deadline_s).done == [crowded]
    assert isinstance(crowded.result, Refused)


def test_a_freed_request_without_an_outcome_ends() -> None:
    """A prefetch is placed and never runs; the end of a request may come before its outcome."""
    router, policy = core()
    for agent, hundreds in (("v", 2), ("w", 4), ("x", 4)):
        start(router, turn(agent, hundreds))
    start(router, turn("v", 2, 1))
    policy.tick(5.0)
    end(router, "v0", 6.0)
    assert admitted(policy, "v", 6.5) == "v", "another of its requests runs"
    router.apply(SeqFree("v1"), 7.0)
    assert admitted(policy, "v", 7.5) == ""
    end(router, "v1", 8.0)
    assert admitted(policy, "v", 8.5) == ""


def test_a_request_delayed_by_a_pause_skips_the_queue() -> None:
    router, policy = core("a", "b")
    for agent, hundreds, to in (("w", 5, "a"), ("x", 5, "a"), ("y", 5, "b"), ("z", 5, "b")):
        start(router, turn(agent, hundreds, to=to))
    early, late = turn("e", 1, deadline_s=100.0), turn("l", 1, deadline_s=60.0)
    assert not policy.admits(early, 1.0)
    assert not policy.admits(late, 1.0)
    end(router, "w0", 2.0)
    policy.tick(3000.0)
    assert policy.admits(early, 40.0)
    assert policy.admits(late, 40.0)
    assert (policy.queue_boost_s(early), policy.queue_boost_s(late)) == (1.0, math.inf)
