"""Three NATS servers in a cluster whose routes pass through proxies."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

from kvmesh.bus.client import Bus
from support.nats import NatsServer, free_port
from support.proxy import Proxy

SERVERS = 3
STORE_BYTES = 1 << 30  # independent of the disk
GRACE_S = 4  # in lame duck mode, before a server disconnects those that stay


class Member(NatsServer):
    """One server of a cluster."""

    def __init__(self, store: Path, name: str) -> None:
        super().__init__(store)
        self.name = name
        self.route_port = free_port()
        self.links: list[Proxy] = []  # in both directions

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def isolate(self) -> None:
        """Partition this server from the others; clients still reach it."""
        for link in self.links:
            link.hold()

    def rejoin(self) -> None:
        for link in self.links:
            link.cut()
            link.release()

    def blocks(self, stream: str) -> Iterator[Path]:
        """The files with a stream's messages."""
        folder = self.store / "js" / "jetstream" / "$G" / "streams" / stream / "msgs"
        yield from sorted(folder.glob("*.blk"))


class Cluster:
    """The servers, started and stopped together."""

    def __init__(self, folder: Path) -> None:
        self.members = [Member(folder / f"n{n}", f"n{n}") for n in range(SERVERS)]
        self._proxies: list[Proxy] = []

    @property
    def url(self) -> str:
        return ",".join(member.url for member in self.members)

    def start(self) -> None:
        for member in self.members:
            member.jetstream = f"max_file_store: {STORE_BYTES}, sync_interval: 1s"
            routes = [self._link(member, other) for other in self.members if other is not member]
            listed = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
            member.settings = (
                f"server_name: {member.name}\n"
                f'lame_duck_duration: "30s", lame_duck_grace_period: "{GRACE_S}s"\n'
                f"cluster {{ name: mesh, listen: 127.0.0.1:{member.route_port}\n"
                f"  no_advertise: true, pool_size: -1, routes: [{listed}] }}"
            )
        for member in self.members:
            member.start()

    def _link(self, first: Member, second: Member) -> int:
        proxy = Proxy(second.route_port)
        proxy.start()
        self._proxies.append(proxy)
        first.links.append(proxy)
        second.links.append(proxy)
        return proxy.port

    def stop(self) -> None:
        for member in self.members:
            member.kill()
        for proxy in self._proxies:
            proxy.stop()

    async def leader(self, bus: Bus, stream: str) -> Member:
        info = await bus.js.stream_info(stream)
        assert info.cluster is not None
        return next(m for m in self.members if m.name == info.cluster.leader)

    async def follower(self, bus: Bus, stream: str) -> Member:
        leader = await self.leader(bus, stream)
        return next(m for m in self.members if m is not leader)

    async def is_current(self, bus: Bus, stream: str) -> bool:
        """True if the stream has a leader and every replica is current."""
        cluster = (await bus.js.stream_info(stream)).cluster
        replicas = (cluster.replicas or []) if cluster is not None else []
        return len(replicas) == SERVERS - 1 and all(peer.current for peer in replicas)


async def is_settled(cluster: Cluster, bus: Bus, stream: str) -> bool:
    """Like `is_current`, but fails as an assertion during an election."""
    try:
        async with asyncio.timeout(5):
            return await cluster.is_current(bus, stream)
    except Exception as error:
        raise AssertionError(f"not yet: {error!r}") from error
