"""Follows the aliases of models in the plan bucket, which `kvmesh model alias` writes."""

import logging

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import MessageDecoder, ModelAlias
from kvmesh.bus.storage.buckets import keys_reader
from kvmesh.bus.streams.reader import StreamMessage

log = logging.getLogger(__name__)
OPEN_S = 10.0
_aliases = MessageDecoder(ModelAlias)


class AliasReader:
    """Keeps `aliases` current, by name.

    An entry that cannot be decoded, has no targets or is at another key is ignored. Aliases that a
    lost bucket held stay: without them clients would get errors.
    """

    def __init__(self, bus: Bus, aliases: dict[str, ModelAlias]) -> None:
        self._subjects = bus.subjects
        self._aliases = aliases
        self._names: dict[str, str] = {}
        bucket = bus.subjects.plan_bucket
        self._prefix = f"$KV.{bucket}."
        self._reader = keys_reader(bus, bucket, "alias.*", self._on_message)

    async def open(self) -> None:
        """Watch; return once every alias that exists now is known. Raises BusError."""
        await self._reader.open()
        await self._reader.until_caught_up(OPEN_S)

    async def close(self) -> None:
        await self._reader.close()

    def _on_message(self, message: StreamMessage) -> None:
        key = message.subject.removeprefix(self._prefix)
        if not message.data:
            self._aliases.pop(self._names.pop(key, ""), None)
            return
        try:
            alias = _aliases.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("ignored an unreadable alias at %s: %s", key, error)
            return
        usable = all(target.weight >= 0 for target in alias.targets) and alias.targets
        if key != self._subjects.alias_key(alias.name) or not usable:
            log.warning("ignored an unusable alias at %s", key)
            return
        self._names[key] = alias.name
        self._aliases[alias.name] = alias
