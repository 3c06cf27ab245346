"""A process that reads late knows it."""

import asyncio

import pytest
from nats.errors import ConnectionClosedError

from kvmesh.bus import promptness
from kvmesh.bus.promptness import LATE_S, Promptness


class Server:
    """Answers each ping when told to."""

    def __init__(self) -> None:
        self.pings: list[asyncio.Future[None]] = []

    async def ping(self, timeout: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pings.append(future)
        await future


async def test_a_round_trip_that_takes_long_makes_a_process_late_until_it_ends() -> None:
    server = Server()
    prompt = Promptness(server.ping)
    assert prompt.behind_s == 0
    prompt.check()
    prompt.check()
    await asyncio.sleep(LATE_S * 1.5)
    assert prompt.late
    assert prompt.behind_s == 0  # nothing was there to read: the server is silent
    prompt.heard()
    await asyncio.sleep(LATE_S)
    prompt.heard()
    assert prompt.behind_s >= LATE_S
    assert len(server.pings) == 1
    server.pings[0].set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert prompt.behind_s == 0


async def test_the_silence_of_a_frozen_server_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promptness, "REST_S", 0.2)
    prompt = Promptness(Server().ping)
    prompt.check()
    prompt.heard()
    await asyncio.sleep(0.3)
    prompt.heard()  # it goes on, and has the answer for what was sent before
    assert prompt.late
    assert prompt.behind_s == 0


async def test_a_server_is_silent_until_it_is_heard() -> None:
    prompt = Promptness(Server().ping)
    assert prompt.silent_s > 3600
    prompt.heard()
    assert prompt.silent_s < 60


async def test_a_round_trip_that_began_earlier_does_not_count() -> None:
    server = Server()
    prompt = Promptness(server.ping)
    prompt.check()
    await asyncio.sleep(0)
    both = [asyncio.ensure_future(prompt.caught_up()) for _ in range(2)]
    await asyncio.sleep(0)
    server.pings[0].set_result(None)
    while len(server.pings) < 2:
        await asyncio.sleep(0)
    assert not any(each.done() for each in both)
    server.pings[1].set_result(None)
    await asyncio.gather(*both)
    assert len(server.pings) == 2


async def test_a_connection_that_is_lost_before_the_trip_begins_leaves_nothing() -> None:
    server = Server()
    prompt = Promptness(server.ping)
    prompt.check()
    prompt.disconnected()
    await asyncio.sleep(LATE_S * 1.5)
    assert not prompt.late
    prompt.check()
    await asyncio.sleep(0)
    assert len(server.pings) == 1


async def test_a_lost_connection_ends_the_wait() -> None:
    server = Server()
    prompt = Promptness(server.ping)
    waiting = asyncio.ensure_future(prompt.caught_up())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    prompt.disconnected()
    await waiting
    assert not prompt.late

    async def closed(timeout: float) -> None:
        raise ConnectionClosedError

    await Promptness(closed).caught_up()
