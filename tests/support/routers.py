"""Router services in this process on a real bus, with a scripted index and a tail of streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from kvmesh.bus.client import Bus, BusOptions, Reply
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import NoResponder, RequestTimeout
from kvmesh.bus.messages import (
    MessageDecoder,
    OverlapQuery,
    OverlapReply,
    Refused,
    Routed,
    RouteReply,
    RouteRequest,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.router.service import RouterService
from kvmesh.runtime.service import Service
from kvmesh.settings.schema import RouterSettings, Settings, StreamSettings
from support.routing import overlaps, worker
from support.wait import PATIENCE_S, eventually

ROUTE_REPLY: MessageDecoder[RouteReply] = MessageDecoder(RouteReply)

QUERIES = MessageDecoder(OverlapQuery)
T = TypeVar("T")


class RunningRouter:
    """A router service as a task of the test."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.router = RouterService(service)
        self.task = asyncio.create_task(self.router.run())

    @property
    def last_read(self) -> int:
        """Stream sequence of the last active-sequence message read."""
        return self.router._sequences.reader.last_seq

    async def stop(self) -> None:
        """Stop as on SIGTERM; raises the error of a failed router."""
        self.service.stopping.set()
        await self.task
        await self.service.close()
        assert not self.service.failed

    async def kill(self) -> None:
        """Stop as on SIGKILL: the connection closes, no lease is withdrawn."""
        await self.service.bus.client.close()
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.service.close()


async def start_router(options: BusOptions, name: str = "r", **router: Any) -> RunningRouter:
    """Start a router with these settings of its section."""
    settings = Settings(router=RouterSettings(**router), streams=StreamSettings(lease_s=10.0))
    return RunningRouter(Service(await Bus.connect(options, name), settings, name))


async def caught_up(bus: Bus, routers: list[RunningRouter]) -> None:
    """Wait until all routers have read the active-sequence stream to its present end."""
    last = (await bus.js.stream_info(bus.subjects.seq_stream)).state.last_seq
    await eventually(lambda: all(router.last_read >= last for router in routers))


@asynccontextmanager
async def running_router(
    options: BusOptions, name: str = "r", **router: Any
) -> AsyncIterator[RunningRouter]:
    running = await start_router(options, name, **router)
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def running_workers(
    bus: Bus, limits: StreamLimits, *names: str, **changes: Any
) -> AsyncIterator[list[Lease]]:
    """Worker cards on the mesh, without workers."""
    leases = [Lease(bus, worker(name, **changes), limits) for name in names]
    for lease in leases:
        await lease.open()
    try:
        yield leases
    finally:
        for lease in leases:
            await lease.close()


async def scripted_index(bus: Bus, held: dict[str, tuple[int, ...]]) -> None:
    """Serve an index that returns the same overlaps for every prompt."""
    answer = overlaps(held)

    async def find(query: OverlapQuery, reply: Reply) -> None:
        reply(OverlapReply(answer.ranks, [answer.rows] * len(query.prompts)))

    await bus.serve(bus.subjects.index("m"), QUERIES, find, queue="index")


async def query_router(
    bus: Bus, message: RouteRequest, timeout: float = 5.0, model: str = "m"
) -> Routed | Refused:
    """The reply of a router; retries while none serves, or after one died with the request."""
    subject = bus.subjects.router(model)
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            return await bus.request(subject, message, ROUTE_REPLY, timeout)
        except (NoResponder, RequestTimeout):
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.02)


async def request_placement(bus: Bus, message: RouteRequest) -> Routed:
    """The placement of a request that must not be refused."""
    reply = await query_router(bus, message)
    assert isinstance(reply, Routed), reply
    return reply


class Tail(Generic[T]):
    """All messages of a stream so far, decoded."""

    def __init__(self, bus: Bus, stream: str, subject: str, decoder: Any) -> None:
        self.seen: list[T] = []
        self._decoder = decoder
        self._reader = StreamReader(bus, stream, subject, self._take, Start())

    def _take(self, message: StreamMessage) -> None:
        self.seen.append(self._decoder.decode(message.data))

    async def __aenter__(self) -> "Tail[T]":
        await self._reader.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._reader.close()
