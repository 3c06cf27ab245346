"""Requests of one instant: the frontend tells routers which requests are alone."""

import asyncio
from typing import Any, cast

from support.routing import request

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Refused, RouteRequest
from kvmesh.bus.subjects import Subjects
from kvmesh.frontend.dispatch.route_client import RECENT_S, Arrivals, Compose, RouteClient


class RecordingBus:
    """Records what is posted; nobody replies."""

    connected = True

    def __init__(self) -> None:
        self.subjects = Subjects("test")
        self.posted: dict[str, RouteRequest] = {}

    def new_inbox(self) -> str:
        return "inbox"

    def post(self, _subject: str, message: RouteRequest, _reply: str = "") -> None:
        self.posted[message.request] = message


def client() -> tuple[RouteClient, dict[str, RouteRequest]]:
    bus = RecordingBus()
    return RouteClient(cast(Bus, bus), cast(Any, None)), bus.posted


def compose(name: str) -> Compose:
    return lambda _new, _arrived: request(name, b"")


async def query(routes: RouteClient, *names: str) -> list["asyncio.Task[Any]"]:
    """Query for these at once, and return when they are sent."""
    tasks = [asyncio.create_task(routes.request("m", compose(name), 9.0)) for name in names]
    await asyncio.sleep(0)
    while routes._new:
        await asyncio.sleep(0)
    return tasks


async def test_a_single_request_is_alone_and_two_of_one_instant_are_not() -> None:
    routes, posted = client()
    await query(routes, "a")
    await query(routes, "b", "c")
    assert {name: message.alone for name, message in posted.items()} == {
        "a": True,
        "b": False,
        "c": False,
    }


async def test_a_request_is_not_alone_while_another_is_prepared() -> None:
    routes, posted = client()
    routes.arrivals.add("other", asyncio.get_running_loop().time())
    await query(routes, "a")
    routes.arrivals.discard("other")
    await query(routes, "b")
    assert not posted["a"].alone
    assert posted["b"].alone


async def test_a_query_that_ends_before_it_is_sent_is_not_sent() -> None:
    routes, posted = client()
    given_up = asyncio.create_task(routes.request("m", compose("a"), 9.0))
    await asyncio.sleep(0)
    given_up.cancel()
    await query(routes, "b")
    assert [*posted] == ["b"]
    assert posted["b"].alone
    stopped = asyncio.create_task(routes.request("m", compose("c"), 9.0))
    await asyncio.sleep(0)
    routes.stop()
    assert isinstance(await stopped, Refused)
    assert [*posted] == ["b"]


def test_an_arrival_counts_until_it_queries_a_router() -> None:
    arrivals = Arrivals()
    assert not arrivals.any_recent(0.0)
    arrivals.add("a", 0.0)
    arrivals.add("b", 0.0)
    arrivals.discard("b")
    assert arrivals.any_recent(0.0)
    arrivals.discard("a")
    arrivals.discard("a")
    assert not arrivals.any_recent(0.0)


def test_an_arrival_that_takes_long_does_not_count() -> None:
    arrivals = Arrivals()
    arrivals.add("slow", 0.0)
    assert not arrivals.any_recent(RECENT_S)
    arrivals.add("new", RECENT_S)
    assert arrivals.any_recent(RECENT_S)
