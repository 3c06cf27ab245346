"""Model files on the bus: workers publish what frontends need for the model's dialect.

One object per model: a zstd-compressed tar of the tokenizer, chat template and configuration
files (never weights), named by the SHA-256 of its content, so that publishing is idempotent.
"""

import asyncio
import hashlib
import io
import logging
import tarfile
from pathlib import Path

import zstandard

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, ModelFilesError, NotFound, ObjectUnreadable
from kvmesh.bus.storage.named_templates import additional_templates, template_name
from kvmesh.bus.storage.object_bucket import ObjectBucket
from kvmesh.bus.storage.tokenizer_file import TOKENIZER, tokenizer_json
from kvmesh.bus.streams.keeper import keeper_of

log = logging.getLogger(__name__)
FILES = (
    "config.json",
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "kvmesh.json",
)
MAX_BYTES = 256 << 20  # of an archive, and of what is in it
MAX_MEMBERS = 256


def pack(folder: Path) -> bytes:
    """The archive of a model folder; raises ModelFilesError if it has no tokenizer."""
    tokenizer = tokenizer_json(folder)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in FILES:
            file = folder / name
            if name == TOKENIZER:
                _add(tar, name, tokenizer)
            elif file.is_file():
                _add(tar, name, file.read_bytes())
        for name in additional_templates(folder):
            _add(tar, name, (folder / name).read_bytes())
    return zstandard.ZstdCompressor(level=3).compress(buffer.getvalue())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def unpack(archive: bytes) -> dict[str, bytes]:
    """File name to content; raises ModelFilesError for anything but an archive made by `pack`.

    Any worker may have written it, so its sizes are checked before memory is taken for them: a
    frame states that of its content, a member may be sparse, and the archive compressed once more.
    """
    files: dict[str, bytes] = {}
    try:
        if not 0 < zstandard.frame_content_size(archive) <= MAX_BYTES:
            raise ModelFilesError(f"a model archive has more than {MAX_BYTES} bytes, or no size")
        content = zstandard.ZstdDecompressor().decompress(archive)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for number, member in enumerate(tar):
                if number == MAX_MEMBERS or not member.isreg() or member.issparse():
                    raise ModelFilesError("a model archive has members other than a model's files")
                file = tar.extractfile(member)
                if file is not None and (member.name in FILES or template_name(member.name)):
                    files[member.name] = file.read()
    except (zstandard.ZstdError, tarfile.TarError, ValueError, OverflowError) as error:
        raise ModelFilesError(f"unreadable model archive: {error}") from error
    return files


async def publish_model(bus: Bus, folder: Path, damaged: bool = False) -> str:
    """Store the files of `folder` unless they are there, not `damaged`; returns their digest."""
    archive = await asyncio.to_thread(pack, folder)
    digest = hashlib.sha256(archive).hexdigest()
    if damaged or not await ObjectBucket(bus, bus.subjects.model_bucket).complete_version(digest):
        await (await bus.js.object_store(bus.subjects.model_bucket)).put(digest, archive)
    return digest


def keep_model(bus: Bus, folder: Path, digest: str) -> None:
    """Publish the files of `folder`, whose digest a card names, again whenever they are missing.

    Also when they are damaged, for which each version of them is read once.
    """
    bucket, sound = ObjectBucket(bus, bus.subjects.model_bucket), 0

    async def restore() -> None:
        nonlocal sound
        version = await bucket.complete_version(digest)
        if version and (version == sound or await _is_sound(bucket, digest)):
            sound = version
            return
        published = await publish_model(bus, folder, damaged=bool(version))
        if published != digest:
            log.warning("%s has changed: the model files %s are lost", folder, digest)
        else:
            log.info("published the lost files of the model in %s again", folder)

    keeper_of(bus).restore("the files of the model", restore)


async def _is_sound(bucket: ObjectBucket, digest: str) -> bool:
    try:
        archive = await bucket.content(digest, MAX_BYTES)
    except ObjectUnreadable:
        return False
    return hashlib.sha256(archive).hexdigest() == digest


async def fetch_model(bus: Bus, digest: str) -> dict[str, bytes]:
    """The files that `publish_model` stored; raises ModelFilesError if they cannot be read."""
    try:
        bucket = ObjectBucket(bus, bus.subjects.model_bucket)
        archive = await bucket.content(digest, MAX_BYTES)
    except NotFound as error:
        raise ModelFilesError(f"no model files with digest {digest}") from error
    except BusError as error:
        raise ModelFilesError(f"cannot read model files {digest}: {error}") from error
    if hashlib.sha256(archive).hexdigest() != digest:
        raise ModelFilesError(f"model files {digest} are damaged")
    return await asyncio.to_thread(unpack, archive)
