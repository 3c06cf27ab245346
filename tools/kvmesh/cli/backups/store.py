"""Reads the buckets of a mesh for a backup, and stores those of one."""

import asyncio
import time
from collections import Counter
from pathlib import Path

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import StreamConfig
from kvmesh.bus.errors import NotFound
from kvmesh.bus.storage.buckets import read_bucket
from kvmesh.cli.backups.archive import (
    ArchiveError,
    BackupManifest,
    StoredValue,
    read_manifest,
    read_values,
    write_archive,
)
from kvmesh.cli.rolling.platforms import caller
from kvmesh.runtime.service import VERSION

# Values of `secrets`, `kvbm` and `weights` are written once: another one would make blocks, salts
# and manifests of running processes useless.
ONCE = ("secrets", "kvbm", "weights")
# The fleet of another hour, and rolls, are no one's intent any more.
PASSING = ("desired", "report", "replacement", "replaced", "roll.")


def authoritative(bus: Bus) -> dict[str, str]:
    """The buckets that nothing else holds: short names to those in the store."""
    s = bus.subjects
    buckets = (
        *(s.secrets_bucket, s.kvbm_bucket, s.weights_bucket),  # first: a mesh makes others at once
        *(s.keys_bucket, s.plan_bucket, s.router_bucket, s.pins_bucket, s.responses_bucket),
    )
    prefix = f"kvm-{s.namespace}-"
    return {name.removeprefix(prefix): name for name in buckets}


async def back_up(bus: Bus, file: Path) -> BackupManifest:
    """Write what nothing else holds into a file; raises ArchiveError or BusError."""
    manifest = BackupManifest(
        namespace=bus.subjects.namespace,
        version=VERSION,
        time=time.time(),
        by=caller(),
        streams={},
        values=[],
    )
    values: list[StoredValue] = []
    for short, bucket in authoritative(bus).items():
        try:
            info = await bus.js.stream_info(f"KV_{bucket}")
            found = await read_bucket(bus, bucket)
        except NotFound:  # nobody has stored any yet
            continue
        manifest.streams[short] = info.config.as_dict()
        for key, data in sorted(found.items()):
            if not (short == "plan" and key.startswith(PASSING)):
                values.append(StoredValue(short, key, data))
    await asyncio.to_thread(write_archive, file, manifest, values)
    return manifest


async def restore(bus: Bus, file: Path, replace: bool) -> Counter[str]:
    """Store the values of a backup, after a check of all; returns their number by bucket.

    Raises ArchiveError, without any change, if a value in the store differs and `replace` is not
    set; one of ONCE differs always for good. Raises BusError.
    """
    manifest = await asyncio.to_thread(read_manifest, file)
    values = await asyncio.to_thread(lambda: list(read_values(file, manifest)))
    names = authoritative(bus)
    if unknown := sorted({value.bucket for value in values} - names.keys()):
        raise ArchiveError(f"{file} has unknown buckets: {', '.join(unknown)}")
    present = {short: await _present(bus, bucket) for short, bucket in names.items()}
    different = [v for v in values if present[v.bucket].get(v.key, v.data) != v.data]
    for value in different:
        if value.bucket in ONCE:
            raise ArchiveError(
                f"the mesh has another value of {value.bucket}/{value.key}, which is written once:"
                " restore into an empty store, before any process starts"
            )
    if different and not replace:
        shown = ", ".join(f"{value.bucket}/{value.key}" for value in different[:5])
        raise ArchiveError(
            f"{len(different)} values of the mesh differ, such as {shown}: --replace replaces them"
        )
    for short, config in manifest.streams.items():
        await _ensure(bus, names[short], manifest.namespace, config)
    stored: Counter[str] = Counter()
    for value in values:
        if present[value.bucket].get(value.key) != value.data:
            await bus.bucket(names[value.bucket]).put(value.key, value.data)
            stored[value.bucket] += 1
    await _verify(bus, names, values)
    return stored


async def _present(bus: Bus, bucket: str) -> dict[str, bytes]:
    try:
        return await read_bucket(bus, bucket)
    except NotFound:
        return {}


async def _ensure(bus: Bus, bucket: str, namespace: str, config: dict[str, object]) -> None:
    """Make a missing bucket as it was, in this mesh's namespace and with its replicas."""
    name = f"KV_{bucket}"
    try:
        await bus.js.stream_info(name)
    except NotFound:
        wanted = StreamConfig.from_response(dict(config)).evolve(
            name=name, subjects=[f"$KV.{bucket}.>"], num_replicas=bus.options.replicas
        )
        await bus.js.add_stream(wanted)


async def _verify(bus: Bus, names: dict[str, str], values: list[StoredValue]) -> None:
    """Read all back; raises ArchiveError for a value that the store does not have."""
    present = {short: await _present(bus, bucket) for short, bucket in names.items()}
    for value in values:
        if present[value.bucket].get(value.key) != value.data:
            raise ArchiveError(f"the store does not return {value.bucket}/{value.key} as stored")
