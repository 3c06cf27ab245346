"""Presence of a kvbm on the mesh: its card and lease, and a publisher of KV events per model."""

import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import Instance, KvEvent, NodeStore, Role
from kvmesh.bus.streams.publisher import KvPublisher
from kvmesh.kvbm.core.blocks.block import TIERS
from kvmesh.kvbm.core.manager import Manager
from kvmesh.kvbm.tiers.storage import Storage, node_name
from kvmesh.runtime.service import VERSION, Service

log = logging.getLogger(__name__)
EVENTS_S = 0.003


class Presence:
    """Updates card and publishers after changes of the attached workers and their layouts.

    `key` is the fingerprint of the node's key, empty if the node has no peers. `dump` publishes
    a rank's contents.
    """

    def __init__(
        self,
        service: Service,
        manager: Manager,
        storage: Storage,
        key: str,
        dump: Callable[[int], None],
    ) -> None:
        self._service = service
        self._manager = manager
        self._storage = storage
        self._key = key
        self._dump = dump
        self._publishers: list[KvPublisher] = []
        self._introduced: tuple[int, frozenset[int], str | None] = (0, frozenset(), None)
        self._lease = Lease(service.bus, self._card(), service.limits)

    @property
    def card(self) -> Instance:
        return self._lease.card

    async def open(self) -> None:
        self._lease.card = self._card()
        await self._lease.open()

    async def leave(self) -> None:
        """Withdraw the card."""
        await self._lease.close()

    async def close(self) -> None:
        for publisher in self._publishers:
            await publisher.close()

    @property
    def outdated(self) -> bool:
        """True if layouts or workers have changed since the last `introduce`."""
        return self._state != self._introduced

    @property
    def _state(self) -> tuple[int, frozenset[int], str | None]:
        attachments = self._manager.attachments
        mode = self._manager.restoring.mode
        return attachments.layout_count, frozenset(attachments.workers), mode

    def introduce(self) -> list[str]:
        """Start publishers for new models; return these models."""
        self._introduced = self._state
        models = self._manager.attachments.models[len(self._publishers) :]
        for model in models:
            publisher = KvPublisher(
                self._service.bus,
                self._service.bus.subjects.kv(model, self._service.name),
                self._service.name,
                self._service.instance,
                EVENTS_S,
                self._dump,
            )
            publisher.start()
            self._publishers.append(publisher)
        return models

    def publish(self, rank: int, events: list[KvEvent]) -> None:
        self._publishers[rank].add(rank, events)

    async def renew_card(self) -> None:
        card = replace(self._lease.card, store=self._card().store)
        try:
            await self._lease.update(card)
        except BusError as error:
            log.debug("the next renewal updates the card: %s", error)

    def _card(self) -> Instance:
        attachments, tiers = self._manager.attachments, self._manager.store.tiers
        settings = self._service.settings.kvbm
        sizes = [tiers[n].slots.capacity if n in tiers else 0 for n in TIERS]
        if settings.remote_url.startswith("file:"):
            sizes[-1] = settings.remote_bytes
        return Instance(
            instance=self._service.instance,
            role=Role.KVBM,
            name=self._service.name,
            version=VERSION,
            started=time.time(),
            node=node_name(settings),
            expects_returns=self._manager.returns.enabled,
            store=NodeStore(
                directory=str(self._storage.directory.path),
                tier_bytes=sizes,
                tier_blocks=attachments.max_blocks,
                models=list(attachments.models),
                layouts=attachments.layouts_in_use if self._key else {},
                key=self._key,
                restores=self._manager.restoring.mode or "",
            ),
        )
