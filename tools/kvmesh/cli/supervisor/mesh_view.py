"""The supervisor's view of the mesh on the bus: leases and starts."""

import asyncio
import logging
from collections.abc import Callable, Collection

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.compatibility import misfits
from kvmesh.bus.discovery.directory import Directory, routable
from kvmesh.bus.discovery.worker_reports import follow_starts
from kvmesh.bus.errors import (
    URL_SETTING,
    BusError,
    BusTimeout,
    BusUnavailable,
    JetStreamUnavailable,
    NotFound,
    ServerUnfit,
    cause,
)
from kvmesh.bus.messages import Instance, Starting, WorkerState, adapter_name
from kvmesh.bus.storage.buckets import read_headers
from kvmesh.bus.streams.configuration import purge_states
from kvmesh.bus.streams.preparation import prepare_streams, why_not_ready
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.runtime.service import bus_options, stream_limits
from kvmesh.settings import Settings, redacted

log = logging.getLogger(__name__)
CONNECT_S = 5.0
RETRY_S = 0.5
LOOK_S = 1e-4  # between looks at the cards, for each card: a look takes a part of that


class MeshView:
    """Follows leases and starts.

    `have_served` are the names of the processes that might be given work at any time. `waits_for`
    names what `follow` waits for. `on_starting` is called with each report of a worker that starts,
    `on_joined` when a process has joined.
    """

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self.bus = bus
        self._limits = stream_limits(settings.streams)
        self._directory = Directory(bus, self._limits, self._joined)
        self._changed = asyncio.Event()
        self._look: asyncio.TimerHandle | None = None
        self.waits_for = ""
        self.on_starting: Callable[[Starting], None] = lambda _: None
        self.on_joined: Callable[[], None] = lambda: None
        self.have_served: set[str] = set()

    @classmethod
    async def connect(cls, settings: Settings, once: bool) -> "MeshView":
        """Connect to NATS, trying it `once` or for some seconds; raises UpError if it fails."""
        try:
            bus = await Bus.connect(bus_options(settings.nats), "up", CONNECT_S, once)
        except BusUnavailable as error:
            raise UpError(str(error) if error.denied else f"{error} ({URL_SETTING})") from error
        return cls(bus, settings)

    async def purge(self) -> None:
        """Empty the streams and delete the index snapshots. Raises UpError."""
        try:
            await prepare_streams(self.bus, self._limits)
            await purge_states(self.bus)
        except BusError as error:
            raise self._unusable(error) from error

    async def follow(self) -> None:
        """Follow leases and starts; return once all present leases are known. Raises UpError.

        Waits while a cluster elects its leaders.
        """
        try:
            await prepare_streams(self.bus, self._limits, self._wait_for_streams)
            while not await self._opened():
                await asyncio.sleep(RETRY_S)
        except BusError as error:
            raise self._unusable(error) from error
        self.waits_for = ""
        await follow_starts(self.bus, lambda starting: self.on_starting(starting))

    def _wait_for_streams(self) -> None:
        self.waits_for = "JetStream"

    async def _opened(self) -> bool:
        """Open the directory; False if the streams have lost their leader meanwhile."""
        try:
            await self._directory.open()
        except (BusTimeout, JetStreamUnavailable) as error:
            self._wait_for_streams()
            log.warning("cannot read the leases yet, retrying: %s", why_not_ready(error))
            await self._directory.close()
            return False
        return True

    def _unusable(self, error: BusError) -> UpError:
        if isinstance(error, ServerUnfit):
            return UpError(str(error))
        return UpError(f"cannot use JetStream at {redacted(self.bus.options.url)}: {error}")

    @property
    def routable(self) -> set[str]:
        """Names of the processes that may be given work."""
        cards = self._directory.instances
        incompatible = misfits(cards)
        serving = (c for c in cards if c.state is not WorkerState.STANDBY and routable(c))
        return {card.name for card in serving if card.instance not in incompatible}

    @property
    def present(self) -> set[str]:
        """Names of the processes that may be given work, or that wait to be promoted."""
        cards = self._directory.instances
        return self.routable | {c.name for c in cards if c.state is WorkerState.STANDBY}

    @property
    def joined(self) -> dict[str, set[str]]:
        """The instances by process name that have a card, whether they may be given work or not."""
        found: dict[str, set[str]] = {}
        for card in self._directory.instances:
            found.setdefault(card.name, set()).add(card.instance)
        return found

    @property
    def models(self) -> list[str]:
        """Names of the served models and adapters."""
        cards = self._directory.instances
        incompatible = misfits(cards)
        found = [c.model for c in cards if c.model and c.instance not in incompatible]
        return sorted({n for m in found for n in (m.name, *map(adapter_name, m.adapters))})

    async def has_keys(self) -> bool:
        """True if the mesh stores API keys, or if this user may not read them."""
        try:
            return bool(await read_headers(self.bus, self.bus.subjects.keys_bucket))
        except NotFound:  # the first key creates the bucket
            return False
        except BusError as error:
            log.debug("cannot read API keys: %s", cause(error))
            return True

    async def until_present(self, names: Callable[[], Collection[str]]) -> None:
        """Return once each of `names` may be given work, or waits to be promoted."""
        while not self.present.issuperset(names()):
            self._changed.clear()
            await self._changed.wait()

    def look_again(self) -> None:
        """Have `until_present` compare with other names."""
        self._changed.set()

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        await self._directory.close()
        await self.bus.close()

    def _joined(self, _: Instance) -> None:
        if self._look is None:
            wait_s = LOOK_S * len(self._directory.instances)
            self._look = asyncio.get_running_loop().call_later(wait_s, self._note_joined)

    def _note_joined(self) -> None:
        self._look = None
        self.have_served |= self.routable
        self._changed.set()
        self.on_joined()
