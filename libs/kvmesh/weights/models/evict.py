"""Removal of models from the model store."""

import asyncio
from dataclasses import dataclass

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound
from kvmesh.weights.errors import ManifestError, ModelStoreError
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.models.catalog import ModelCatalog, ModelEntry
from kvmesh.weights.models.store import ModelStore, used_by

AT_ONCE = 16


@dataclass
class EvictReport:
    """Objects and bytes that were removed from the model store."""

    objects: int = 0
    removed_bytes: int = 0


async def evict(bus: Bus, entry: ModelEntry) -> EvictReport:
    """Remove an entry, and all chunks that no other one uses; raises BusError, ModelStoreError."""
    await ModelCatalog(bus).remove(entry)
    return await collect(bus)


async def collect(bus: Bus) -> EvictReport:
    """Remove all objects of the model store that no entry uses.

    Raises ModelStoreError, and removes nothing, if the manifest of a complete entry is unreadable.
    """
    store, report = ModelStore(bus), EvictReport()
    try:
        present = await store.objects.complete()  # before the entries, see `store`
    except NotFound:
        return report
    manifests = await _manifests(store, await ModelCatalog(bus).entries())
    unused = [present[name] for name in present.keys() - used_by(manifests)]

    async def worker() -> None:
        while unused:
            obj = unused.pop()
            if await store.objects.remove(obj):
                report.objects += 1
                report.removed_bytes += obj.size

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    await store.objects.remove_abandoned(list((await store.objects.complete()).values()))
    return report


async def _manifests(store: ModelStore, entries: list[ModelEntry]) -> list[Manifest]:
    """The manifests of entries; a push whose manifest is not there yet uses no chunk so far."""
    found = []
    for entry in entries:
        try:
            found.append(await store.manifest(entry.digest))
        except ManifestError as error:
            if entry.complete or not isinstance(error.__cause__, NotFound):
                reason = f"{entry.reference} is unreadable, nothing else is removed: {error}"
                raise ModelStoreError(reason) from error
    return found
