"""The file of a backup: a zip with one member per value, and a manifest with their digests.

It holds secrets, so only its owner may read it.
"""

import hashlib
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

FORMAT = 1
MANIFEST = "manifest.json"
MOST_MANIFEST = 1 << 28  # bytes
# What a damaged or foreign file makes of `zipfile`.
DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError),
    *(KeyError, ValueError, NotImplementedError, RuntimeError),
)


class ArchiveError(Exception):
    """The file is no usable backup, or cannot be written; the message says why."""


class StoredValue(NamedTuple):
    """A value of a bucket."""

    bucket: str
    key: str
    data: bytes


class ValueEntry(msgspec.Struct, frozen=True):
    """A value in the manifest: its SHA-256, and its size in bytes."""

    bucket: str
    key: str
    sha256: str
    size: int

    @property
    def member(self) -> str:
        return f"{self.bucket}/{self.key}"


class BackupManifest(msgspec.Struct, kw_only=True):
    """The contents of a backup: `streams` are the configurations of the buckets by their names.

    Buckets are named without the namespace. `time` is in Unix seconds.
    """

    format: int = FORMAT
    namespace: str
    version: str
    time: float
    by: str
    streams: dict[str, dict[str, Any]]
    values: list[ValueEntry]


_manifests = msgspec.json.Decoder(BackupManifest)


def write_archive(file: Path, manifest: BackupManifest, values: Iterable[StoredValue]) -> None:
    """Write a backup, and fill the manifest's values; raises ArchiveError.

    The file appears once it is complete and has been read back.
    """
    fresh = file.with_name(f".{file.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        opened = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "w+b") as stream:
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
                for value in values:
                    entry = ValueEntry(
                        value.bucket, value.key, _digest(value.data), len(value.data)
                    )
                    archive.writestr(entry.member, value.data)
                    manifest.values.append(entry)
                archive.writestr(MANIFEST, msgspec.json.encode(manifest))
            stream.flush()
            os.fsync(stream.fileno())
        for _ in read_values(fresh, read_manifest(fresh)):
            pass
        fresh.replace(file)
    except OSError as error:
        raise ArchiveError(f"cannot write {file}: {error.strerror}") from error
    finally:
        fresh.unlink(missing_ok=True)


def read_manifest(file: Path) -> BackupManifest:
    """The manifest of a backup; raises ArchiveError."""
    try:
        with zipfile.ZipFile(file) as archive:
            if archive.getinfo(MANIFEST).file_size > MOST_MANIFEST:
                raise ArchiveError(f"{file}: the manifest is too large")
            manifest = _manifests.decode(archive.read(MANIFEST))
    except OSError as error:
        raise ArchiveError(f"cannot read {file}: {error.strerror}") from error
    except (*DAMAGE, msgspec.MsgspecError) as error:
        raise ArchiveError(f"{file} is no backup of a mesh: {error}") from error
    if manifest.format > FORMAT:
        raise ArchiveError(f"{file} was made by a newer kvmesh, {manifest.version}")
    return manifest


def read_values(file: Path, manifest: BackupManifest) -> Iterator[StoredValue]:
    """The values of a backup, each checked against its digest; raises ArchiveError."""
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in manifest.values:
                if archive.getinfo(entry.member).file_size != entry.size:
                    raise ArchiveError(f"{file} is damaged at {entry.member}")
                data = archive.read(entry.member)
                if _digest(data) != entry.sha256:
                    raise ArchiveError(f"{file} is damaged at {entry.member}")
                yield StoredValue(entry.bucket, entry.key, data)
    except OSError as error:
        raise ArchiveError(f"cannot read {file}: {error.strerror}") from error
    except DAMAGE as error:
        raise ArchiveError(f"{file} is damaged: {error}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
