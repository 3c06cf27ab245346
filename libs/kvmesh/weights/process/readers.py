"""Readers of chunks: from another worker over the network, or from this node's disk."""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from blake3 import blake3

from kvmesh.bus.messages import WeightOffer
from kvmesh.runtime.background import ended
from kvmesh.transfer import Line, TransferError, Transport
from kvmesh.transfer.channel import Descriptor, TransferReply
from kvmesh.transfer.transport import decode_descriptor
from kvmesh.weights.errors import CheckpointError, WrongDigest
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.process.staging import ChunkBuffers

log = logging.getLogger(__name__)
R = TypeVar("R")
LINES = 4  # connections to one source: some receive while others' bytes are digested
DISK_THREADS = 2


class ChunkReader(Protocol):
    """Reads chunks of one copy from one source.

    `direct`: a read that is cancelled has ended, and writes no more into its target, when
    `read` returns.
    """

    direct: bool

    async def read(self, chunk: int, target: memoryview) -> None:
        """Fill `target` and verify it; raises TransferError, OSError or WrongDigest."""
        ...

    async def have(self) -> bytes:
        """One byte per chunk; raises TransferError or OSError."""
        ...

    def close(self) -> None: ...


class SourceReader:
    """Reads from another worker, over a few connections that it uses in turn.

    The owner checks each read. The bytes come through NIXL if both sides have it.
    """

    direct = True

    def __init__(
        self, offer: WeightOffer, manifest: Manifest, pool: Executor, staging: ChunkBuffers
    ) -> None:
        """Raises TransferError if a descriptor is malformed."""
        self._manifest = manifest
        self._pool = pool
        self._staging = staging
        self._nixl_fails = False
        self._lines: asyncio.LifoQueue[Line] = asyncio.LifoQueue()
        self._take_over(offer)
        for _ in range(LINES):
            self._lines.put_nowait(Line(self._files[0]))

    def renewed(self, offer: WeightOffer) -> bool:
        """True if an offer is of the same process, which may have NIXL by now."""
        try:
            if decode_descriptor(offer.have).token != self._have.token:
                return False
            self._take_over(offer)
        except TransferError:
            return False
        return True

    async def read(self, chunk: int, target: memoryview) -> None:
        file, offset, size = self._manifest.chunks[chunk]
        digest = self._manifest.chunk_digest(chunk)
        await self._run(self._files[file], offset, target[:size], digest)

    async def have(self) -> bytes:
        found = bytearray(len(self._manifest.chunks))
        await self._run(self._have, 0, memoryview(found), b"")
        return bytes(found)

    def close(self) -> None:
        while not self._lines.empty():
            self._lines.get_nowait().close()

    def _take_over(self, offer: WeightOffer) -> None:
        files = [decode_descriptor(file) for file in offer.files]
        self._have = decode_descriptor(offer.have)
        self._files = files
        self.offer = offer

    async def _run(self, owner: Descriptor, offset: int, target: memoryview, digest: bytes) -> None:
        """Read and verify; a cancelled read ends before this does."""
        line = await self._lines.get()
        try:
            nixl = self._transport(owner) if digest else None
            request = (line, owner.token, offset, target, digest)
            reply = await self._in_thread(line, _read, *request, nixl is not None)
            if nixl is not None and reply.agent:
                if await self._through(nixl, reply, owner, offset, target):
                    await self._in_thread(line, _verify, target, digest)
                else:
                    await self._in_thread(line, _read, *request, False)
        except asyncio.CancelledError:
            line.close()
            line = Line(self._files[0])
            raise
        finally:
            self._lines.put_nowait(line)

    def _transport(self, owner: Descriptor) -> Transport | None:
        return self._staging.transport if owner.nixl and not self._nixl_fails else None

    async def _through(
        self,
        nixl: Transport,
        reply: TransferReply,
        owner: Descriptor,
        offset: int,
        target: memoryview,
    ) -> bool:
        """Read as the owner has permitted; False if the bytes must come over TCP."""
        try:
            region = self._staging.region(target)
            await nixl.read_directly(owner, reply, region, offset, len(target))
        except TransferError as error:
            self._nixl_fails = True
            log.warning("weights from %s come over TCP: %s", self.offer.instance, error.detail)
            if not error.settled:
                raise
            return False
        self._staging.direct_bytes += len(target)
        return True

    async def _in_thread(self, line: Line, work: Callable[..., R], *arguments: Any) -> R:
        """The result of work in a thread, which a cancellation ends by cutting its line."""
        loop = asyncio.get_running_loop()
        return await ended(loop.run_in_executor(self._pool, work, *arguments), line.cut)


class DiskReader:
    """Reads the files of this node's model folder. A disk that hangs cannot be interrupted."""

    direct = False

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Raises CheckpointError unless the folder has files of the same names and sizes."""
        self._manifest = manifest
        self._pool = ThreadPoolExecutor(DISK_THREADS, "disk")
        self._files: list[int] = []
        try:
            for entry in manifest.files:
                path = folder / entry.name
                if path.stat().st_size != entry.size:
                    raise CheckpointError(f"{path} does not have {entry.size} bytes")
                self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
        except CheckpointError:
            self.close()
            raise

    async def read(self, chunk: int, target: memoryview) -> None:
        file, offset, size = self._manifest.chunks[chunk]
        digest, loop = self._manifest.chunk_digest(chunk), asyncio.get_running_loop()
        await loop.run_in_executor(
            self._pool, _read_file, self._files[file], offset, target[:size], digest
        )

    async def have(self) -> bytes:
        return b"\1" * len(self._manifest.chunks)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        while self._files:
            os.close(self._files.pop())


def _read(
    line: Line, token: bytes, offset: int, target: memoryview, digest: bytes, direct: bool
) -> TransferReply:
    """Read and verify, unless the reply permits a direct read."""
    reply = line.read(token, offset, target, direct)
    if not reply.agent:
        _verify(target, digest)
    return reply


def _read_file(file: int, offset: int, target: memoryview, digest: bytes) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(file, [target[done:]], offset + done)
        if not count:
            raise OSError("the file is shorter than it was")
        done += count
    _verify(target, digest)


def _verify(data: memoryview, digest: bytes) -> None:
    """Check a digest, if there is one; raises WrongDigest."""
    if digest and blake3(data).digest() != digest:
        raise WrongDigest("the bytes do not have the digest of their chunk")
