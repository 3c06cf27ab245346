"""Follows the models that may run without workers, which the planner lists in the plan bucket."""

import logging
from collections.abc import Callable

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import IdleModel, MessageDecoder, ModelCard
from kvmesh.bus.storage.buckets import keys_reader
from kvmesh.bus.streams.reader import StreamMessage

log = logging.getLogger(__name__)
OPEN_S = 10.0
_entries = MessageDecoder(IdleModel)


class IdleModelReader:
    """Calls `listed` with the card of each such model and `removed` with the name of a former one.

    An entry that cannot be decoded, or is at the key of another model, is ignored.
    """

    def __init__(
        self, bus: Bus, listed: Callable[[ModelCard], None], removed: Callable[[str], None]
    ) -> None:
        self._subjects = bus.subjects
        self._listed = listed
        self._removed = removed
        self._names: dict[str, str] = {}
        bucket = bus.subjects.plan_bucket
        self._prefix = f"$KV.{bucket}."
        self._reader = keys_reader(bus, bucket, "idle.*", self._on_message, self._on_recreated)

    async def open(self) -> None:
        """Watch; return once every entry that exists now is known. Raises BusError."""
        await self._reader.open()
        await self._reader.until_caught_up(OPEN_S)

    async def close(self) -> None:
        await self._reader.close()

    def _on_message(self, message: StreamMessage) -> None:
        key = message.subject.removeprefix(self._prefix)
        if not message.data:
            self._drop(key)
            return
        try:
            card = _entries.decode(message.data).card
        except msgspec.MsgspecError as error:
            log.warning("ignored an unreadable idle model at %s: %s", key, error)
            return
        if key != self._subjects.idle_key(card.name):
            log.warning("ignored the idle model %s at %s", card.name, key)
            return
        self._names[key] = card.name
        self._listed(card)

    def _on_recreated(self) -> None:
        for key in list(self._names):
            self._drop(key)

    def _drop(self, key: str) -> None:
        name = self._names.pop(key, None)
        if name is not None:
            self._removed(name)
