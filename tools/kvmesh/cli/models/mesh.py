"""Models of the mesh: push, pull, list, evict."""

import asyncio
import sys
import time
from pathlib import Path

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound
from kvmesh.bus.messages import Instance, MessageDecoder
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.cli.models.local import cache_of
from kvmesh.cli.models.progress import BytesProgress, told
from kvmesh.runtime.quantities import counted, duration, size
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings
from kvmesh.weights.checkpoint import cache_folder
from kvmesh.weights.errors import ManifestError, ModelStoreError
from kvmesh.weights.models.catalog import ModelCatalog, ModelEntry, find_model
from kvmesh.weights.models.evict import evict
from kvmesh.weights.models.folder import folder_content
from kvmesh.weights.models.former import remove_former_manifests
from kvmesh.weights.models.pull import ModelPull, other_folder, pulled_text
from kvmesh.weights.models.push import ModelPush, pushed_text
from kvmesh.weights.models.reference import parse_reference
from kvmesh.weights.models.servable import check_servable
from kvmesh.weights.models.store import ModelStore, used_by

_cards = MessageDecoder(Instance)


async def push(bus: Bus, settings: Settings, folder: Path, name: str, with_code: bool) -> int:
    """Push a folder; raises WeightsError or BusError."""
    reference = parse_reference(name)
    if reference.digest:
        raise ModelStoreError("the digest of a pushed model follows from its files")
    async with told(f"reading {folder}"):
        content = await asyncio.to_thread(
            folder_content, folder, name, with_code=with_code, cache=cache_folder()
        )
    await asyncio.to_thread(check_servable, folder, content)
    if content.weights is None:
        print(
            f"{folder} has no weights: only the engines mock and openai serve it", file=sys.stderr
        )
    for skipped, reason in content.skipped.items():
        print(f"left out {skipped}: {reason}", file=sys.stderr)
    pushing = ModelPush(bus, folder, content, name)
    pushing.report.progress = BytesProgress("pushed").show
    report = await pushing.run(stream_limits(settings.streams))
    print(pushed_text(report))
    print(f"serve it with: kvmesh worker --model {report.entry.reference}")
    return 0


async def pull(bus: Bus, settings: Settings, text: str, folder: Path | None) -> int:
    """Pull a model into a folder, or into this machine's cache."""
    entry = await find_model(bus, parse_reference(text))
    manifest = await ModelStore(bus).manifest(entry.digest)
    place = (
        await asyncio.to_thread(cache_of(settings).use, entry.name, entry.digest, entry.size)
        if folder is None
        else other_folder(folder)
    )
    try:
        pulling = ModelPull(bus, entry, manifest, settings.weights.sources)
        pulling.report.progress = BytesProgress("pulled").show
        print(pulled_text(await pulling.everything(place)))
        print(place.folder)
    finally:
        place.close()
    return 0


async def show(bus: Bus, as_json: bool) -> int:
    """Print the models that the mesh holds, with the workers that serve them."""
    entries = await ModelCatalog(bus).entries()
    serving = await _serving(bus)
    present = await _present(bus, [e for e in entries if not e.complete])
    if as_json:
        content = [
            {
                **msgspec.structs.asdict(entry),
                "present": present.get(entry.digest, entry.chunks),
                "workers": _workers(serving, entry),
            }
            for entry in entries
        ]
        print(msgspec.json.encode(content).decode())
        return 0
    for entry in entries:
        state = "complete" if entry.weights else "complete, without weights"
        if not entry.complete:
            state = f"incomplete: {present[entry.digest]} of {counted(entry.chunks, 'chunk')}"
        age = duration(max(time.time() - entry.created, 0.0))
        workers = ", ".join(_workers(serving, entry)) or "no worker"
        print(f"{entry.reference}  {size(entry.size)}  {state}  {age} old  {workers}")
    if not entries:
        print("the mesh holds no models")
    return 0


async def remove(bus: Bus, text: str) -> int:
    """Evict a model, and remove manifests of former weights; raises WeightsError or BusError."""
    found = await ModelCatalog(bus).find(parse_reference(text), incomplete=True)
    if len(found) > 1:
        known = ", ".join(entry.reference for entry in found)
        raise ModelStoreError(f"{text} may be {known}")
    report = await evict(bus, found[0])
    former = await remove_former_manifests(bus)
    print(f"evicted {found[0].reference}: {size(report.removed_bytes)} removed from the mesh")
    if former:
        print(f"removed {counted(former, 'manifest')} of former weights")
    return 0


async def _serving(bus: Bus) -> list[Instance]:
    """The cards of workers."""
    cards = []
    for data in (await read_bucket(bus, bus.subjects.instances_bucket, "worker.>")).values():
        try:
            cards.append(_cards.decode(data))
        except msgspec.MsgspecError:  # of another version
            continue
    return cards


def _workers(cards: list[Instance], entry: ModelEntry) -> list[str]:
    """The names of the workers that serve an entry's revision, or the same weights."""
    return sorted(
        card.name
        for card in cards
        if card.model is not None
        and (
            (card.model.name == entry.name and card.model.revision == entry.digest)
            or (card.model.weights and card.model.weights == entry.weights)
        )
    )


async def _present(bus: Bus, entries: list[ModelEntry]) -> dict[str, int]:
    """The chunks of incomplete entries that are in the store, by digest."""
    if not entries:
        return {}
    store = ModelStore(bus)
    try:
        stored = await store.objects.complete()
    except NotFound:
        return dict.fromkeys((entry.digest for entry in entries), 0)
    found = dict.fromkeys((entry.digest for entry in entries), 0)
    for entry in entries:
        try:
            manifest = await store.manifest(entry.digest)
        except ManifestError:  # the push ended before it
            continue
        found[entry.digest] = max(len(used_by([manifest]) & stored.keys()) - 1, 0)
    return found
