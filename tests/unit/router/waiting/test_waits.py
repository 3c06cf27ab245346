"""Behaviour that all ways to wait share."""

from collections.abc import Callable
from random import Random

import pytest
from support.routing import BLOCK, request, sequence, worker

from kvmesh.router.placement.router import RouterCore
from kvmesh.router.waiting.batch_lane import BatchLane
from kvmesh.router.waiting.common_queue import CommonQueue
from kvmesh.router.waiting.gathering import Gathering
from kvmesh.router.waiting.held_prompts import HeldPrompts
from kvmesh.router.waiting.prefix_waits import PrefixWaits
from kvmesh.router.waiting.queue_entries import QueueEntries
from kvmesh.router.waiting.resting import Resting
from kvmesh.router.waiting.ticket import Ticket
from kvmesh.router.waiting.wait import Wait
from kvmesh.settings.schema import RouterSettings

Enter = Callable[[RouterCore, Ticket], Wait[object]]


def resting(core: RouterCore, ticket: Ticket) -> Wait[object]:
    wait = Resting(core.policies)
    wait.add(ticket)
    return wait


def gathering(_: RouterCore, ticket: Ticket) -> Wait[object]:
    wait = Gathering(0.001)
    wait.add(ticket, 0.0)
    return wait


def common_queue(core: RouterCore, ticket: Ticket) -> Wait[object]:
    batch = BatchLane(core)
    wait = CommonQueue(core, batch, QueueEntries(core, batch, "r"), "r")
    wait.apply(wait.add(ticket, 0.0))
    return wait


def prefix_wait(core: RouterCore, ticket: Ticket) -> Wait[object]:
    wait = PrefixWaits(core)
    decision = core.decide(ticket.request, None, 0.0)
    assert wait.begin(ticket, decision, 0.0)
    return wait


def held(core: RouterCore, ticket: Ticket) -> Wait[object]:
    wait = HeldPrompts(core.table, core.prefills, core.speeds)
    decision = core.decide(ticket.request, None, 0.0)
    wait.add(ticket, decision, core.commit(decision, 0.0), 0.0, 0, 0.0)
    return wait


WAYS = [resting, gathering, common_queue, prefix_wait, held]


@pytest.fixture
def core() -> RouterCore:
    """A router whose only rank computes a prompt of three hundred blocks."""
    core = RouterCore("m", "r", RouterSettings(predicted_ttl_s=60.0), Random(7))
    core.join(worker("a", step=100 * BLOCK))
    core.commit(core.decide(request("first", sequence(*range(300))), None, 0.0), 0.0)
    return core


@pytest.mark.parametrize("enter", WAYS)
def test_a_request_waits_until_it_is_dropped(core: RouterCore, enter: Enter) -> None:
    ticket = Ticket(request("x", sequence(*range(310))), 0.0)
    wait = enter(core, ticket)
    assert len(wait) == 1
    assert wait.tickets == [ticket]
    assert wait.drop("another") is None
    assert wait.drop("x") is ticket
    assert (len(wait), wait.tickets, wait.drop("x")) == (0, [], None)
    assert list(wait.take_due(1000.0)) == []


@pytest.mark.parametrize("enter", WAYS)
def test_a_wait_ends_once(core: RouterCore, enter: Enter) -> None:
    ticket = Ticket(request("x", sequence(*range(310))), 0.0)
    wait = enter(core, ticket)
    for slot in range(core.table.size):
        core.table.prefill_tokens[slot] = 0.0  # there is capacity
    assert len(list(wait.take_due(10.0))) == 1
    assert wait.tickets == []
