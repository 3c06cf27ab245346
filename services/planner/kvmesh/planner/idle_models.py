"""Models that may run without workers: the planner lists them in the plan bucket."""

import logging
from collections.abc import Callable

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import IdleModel, Instance, MessageDecoder, encode
from kvmesh.bus.storage.buckets import KnownEntries, read_bucket
from kvmesh.runtime.warnings import Warnings

log = logging.getLogger(__name__)
_idle = MessageDecoder(IdleModel)


class IdleModels:
    """The entries of the bucket; `planner` is the instance that signs new ones.

    A planner that `leads` stores them again if the server has lost them.
    """

    def __init__(
        self, bus: Bus, planner: str, warnings: Warnings, leads: Callable[[], bool]
    ) -> None:
        self._bus = bus
        self._warnings = warnings
        self._planner = planner
        self._known = KnownEntries(bus, bus.subjects.plan_bucket, "idle models", leads)
        self.listed: set[str] = set()

    async def read(self) -> None:
        """Read the entries, which another planner may have written; raises BusError."""
        self.listed.clear()
        entries = await read_bucket(self._bus, self._bus.subjects.plan_bucket, "idle.*")
        for key, data in entries.items():
            try:
                self.listed.add(_idle.decode(data).card.name)
                self._known.note(key, data)
            except msgspec.MsgspecError as error:
                log.warning("ignored the unreadable idle model %s: %s", key, error)

    async def update(
        self, model: str, may_be_idle: bool, worker: Instance | None, now: float
    ) -> None:
        """List a model, from the card of one of its workers, or remove it.

        Without a worker no model is listed. An error of the bus is a warning until a later call
        succeeds.
        """
        if may_be_idle is (model in self.listed):
            return
        entry = self._entry(worker, now) if may_be_idle else None
        if may_be_idle and entry is None:
            return
        try:
            bucket = self._bus.bucket(self._bus.subjects.plan_bucket)
            key = self._bus.subjects.idle_key(model)
            self._known.note(key, b"")
            if entry is not None:
                data = encode(entry)
                await bucket.put(key, data)
                self._known.note(key, data)
                self.listed.add(model)
            else:
                await bucket.delete(key)
                self.listed.discard(model)
            failed = {}
        except BusError as error:
            failed = {model: f"cannot list {model} as a model that may be idle: {cause(error)}"}
        self._warnings.update(f"idle {model}", failed)

    def _entry(self, worker: Instance | None, now: float) -> IdleModel | None:
        if worker is None or worker.model is None:
            return None
        return IdleModel(
            card=worker.model, capacity=worker.capacity, since=now, planner=self._planner
        )
