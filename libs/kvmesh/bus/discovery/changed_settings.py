"""Follows the settings of one service that `kvmesh config set` changes in the running mesh."""

import asyncio
import logging
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import ChangedSettings, MessageDecoder
from kvmesh.bus.storage.buckets import KnownEntries, keys_reader
from kvmesh.bus.streams.reader import StreamMessage
from kvmesh.settings import SettingsError
from kvmesh.settings.live import LiveSection

log = logging.getLogger(__name__)
OPEN_S = 10.0
LABEL = "config"  # of a card: the revision of the changes that the process has applied
_changes = MessageDecoder(ChangedSettings)


class ChangedSettingsReader:
    """Applies changes to a section, and calls `changed` after each.

    Changes that this process does not know, or that do not suit its other settings, are logged and
    leave all as it was. The values of a lost bucket stay, and are stored again while `active`.
    """

    def __init__(
        self,
        bus: Bus,
        name: str,
        section: LiveSection,
        changed: Callable[[], None] = lambda: None,
        active: Callable[[], bool] = lambda: True,
    ) -> None:
        self._section = section
        self._changed = changed
        self._key = bus.subjects.config_key(name)
        bucket = bus.subjects.config_bucket(name)
        self._known = KnownEntries(bus, bucket, "changed settings", active)
        self._reader = keys_reader(bus, bucket, self._key, self._on_message)
        self._applied = asyncio.Event()
        self.labels: dict[str, str] = {}

    async def open(self) -> None:
        """Watch; return once the present changes are applied. Raises BusError."""
        await self._reader.open()
        await self._reader.until_caught_up(OPEN_S)

    async def close(self) -> None:
        await self._reader.close()

    async def show(self, lease: Lease) -> None:
        """Keep on the card which changes are applied, until cancelled."""
        while True:
            await self._applied.wait()
            self._applied.clear()
            labels = {**lease.card.labels, **self.labels}
            if labels == lease.card.labels:
                continue
            try:
                await lease.update(replace(lease.card, labels=labels))
            except BusError as error:
                log.debug("the card will change with the next renewal: %s", cause(error))

    def _on_message(self, message: StreamMessage) -> None:
        self._known.note(self._key, message.data)
        try:
            texts = _changes.decode(message.data).values if message.data else {}
            changed = self._section.apply(texts)
        except (msgspec.MsgspecError, SettingsError) as error:
            log.warning("changed settings are not applied: %s", error)
            return
        for name, (before, after) in changed.items():
            log.info("%s is %s, it was %s", name, after, before)
        if changed:
            self._changed()
        self.labels = {LABEL: str(message.seq)}
        self._applied.set()
