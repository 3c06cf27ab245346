"""Removal of models from the model store, and of manifests that nobody needs any more."""

import asyncio
import logging
import time
from dataclasses import dataclass

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.bus.storage.object_bucket import ObjectBucket, StoredObject
from kvmesh.bus.subjects import manifest_object
from kvmesh.weights.agent.search import offered
from kvmesh.weights.errors import ManifestError, ModelStoreError
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.models.catalog import ModelCatalog, ModelEntry
from kvmesh.weights.models.store import ModelStore, used_by

log = logging.getLogger(__name__)
AT_ONCE = 16
GRACE_S = 3600.0  # from the last use of a manifest that no card and no entry names


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


async def remove_former_manifests(bus: Bus, grace_s: float = GRACE_S) -> int:
    """Remove manifests of weights that nobody has, and return their number; raises BusError.

    Kept are those that a card or an entry of the catalog names, that a worker offers, or that were
    put less than `grace_s` seconds ago.
    """
    bucket = ObjectBucket(bus, bus.subjects.model_bucket)
    prefix, now = manifest_object(""), time.time()
    found = await bucket.complete()
    old: dict[str, StoredObject] = {
        name.removeprefix(prefix): obj
        for name, obj in found.items()
        if name.startswith(prefix) and now - obj.stored > grace_s
    }
    if not old:
        return 0
    cards = await read_bucket(bus, bus.subjects.instances_bucket)
    named = b"\n".join(cards.values())
    entries = {entry.weights for entry in await ModelCatalog(bus).entries()}
    removed = 0
    for digest, obj in old.items():
        if digest in entries or digest.encode() in named or await offered(bus, digest):
            continue
        if await bucket.remove(obj):
            removed += 1
            log.info("removed the manifest of former weights %s", digest[:12])
    return removed
