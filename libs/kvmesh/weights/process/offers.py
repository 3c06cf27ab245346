"""The copies that a weights process offers to others."""

import asyncio
import logging
from functools import partial
from hashlib import blake2b
from mmap import mmap
from pathlib import Path

import numpy as np

from kvmesh.bus.client import Bus, Reply, Subscription
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import MessageDecoder, WeightOffer, WeightQuery
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.transfer import Grant, LentBytes, LentFile, TransferError, Transport
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.process.manifests import ManifestStore
from kvmesh.weights.stored_copy import HELD, StoredCopy

log = logging.getLogger(__name__)
GRANT_S = 60.0  # after which no byte is sent if this process has stopped renewing
RENEW_S = 20.0
SENT = 3  # a chunk that is held, and was sent to another worker of late
_queries = MessageDecoder(WeightQuery)


class _Offered:
    """A copy that others may read."""

    def __init__(self, manifest: Manifest, copy: StoredCopy | None) -> None:
        count = len(manifest.chunks)
        self.manifest = manifest
        self.lent: list[LentBytes] = []
        self.grants: list[Grant] = []
        self.subscription: Subscription | None = None
        self._copy = copy
        self._sent = np.zeros(count, np.bool_)
        self._sent_before = self._sent
        self.shown = False
        self._held = np.full(count, HELD, np.uint8)

    @property
    def in_memory(self) -> bool:
        return self._copy is not None

    @property
    def complete(self) -> bool:
        return self._copy is None or self._copy.complete

    def memory(self, file: int) -> mmap | None:
        """The memory of a file, if the copy is in memory."""
        if self._copy is None or file >= len(self.manifest.files):
            return None
        return self._copy.file(file, writable=True)

    def sent(self, file: int, offset: int, length: int) -> None:
        """A range of a file was sent to another worker."""
        chunks = self.manifest.chunks_in(file, offset, length)
        self._sent[chunks.start : chunks.stop] = True

    def renew(self) -> None:
        """Extend the grants, and forget older ranges that were sent."""
        for grant in self.grants:
            grant.expire_in(GRANT_S)
        self._sent_before, self._sent = self._sent, np.zeros_like(self._sent)

    def marks(self) -> bytes:
        """One byte per chunk, as `StreamPlan.learn` reads it."""
        have = self._held
        if self._copy is not None:
            have = np.frombuffer(bytes(self._copy.have), np.uint8)
        sent = (self._sent | self._sent_before) & (have == HELD)
        return np.where(sent, SENT, have).astype(np.uint8).tobytes()


class Offers:
    """Replies to queries for the copies that were added."""

    def __init__(self, bus: Bus, transport: Transport, instance: str, node: str) -> None:
        self._bus = bus
        self._transport = transport
        self._instance = instance
        self._node = node
        self._offered: dict[str, _Offered] = {}
        self.manifests = ManifestStore(bus)
        self._tasks = BackgroundTasks()
        self._renewing = False

    async def add_copy(self, copy: StoredCopy) -> None:
        """Offer a copy in memory, also while it is incomplete; raises OSError or BusError."""
        await self._add(_Offered(copy.manifest, copy), copy.folder)

    async def add_files(self, manifest: Manifest, folder: Path) -> None:
        """Offer the files of a model folder, which the manifest describes; raises as above.

        Files that are offered stay open, since others read them.
        """
        known = self._offered.get(manifest.digest)
        if known is None or known.in_memory:
            await self._add(_Offered(manifest, None), folder)

    async def remove_copy(self, digest: str) -> None:
        """End the offer of a copy in memory, unless files have taken its place."""
        offered = self._offered.get(digest)
        if offered is not None and offered.in_memory:
            await self.remove(digest)

    async def remove(self, digest: str) -> None:
        """End the offer of a copy; what others read of it ends at once."""
        offered = self._offered.pop(digest, None)
        if offered is not None:
            self.manifests.release(digest)
            await _end(offered)

    async def nixl_runs(self) -> None:
        """Let others read the copies in memory through NIXL, those added later too."""
        for offered in list(self._offered.values()):
            await self._show(offered)

    async def close(self) -> None:
        await self._tasks.close()
        for digest in list(self._offered):
            await self.remove(digest)

    async def _add(self, offered: _Offered, folder: Path) -> None:
        """Offer a copy in place of one with the same digest, which stays if this fails."""
        manifest = offered.manifest
        digest = manifest.digest

        def answer(query: WeightQuery, reply: Reply) -> None:
            if (
                self._offered.get(digest) is offered
                and query.instance != self._instance
                and query.above <= draw(query.query, self._instance) < query.share
            ):
                reply(self._message(offered))

        try:
            for index, file in enumerate(manifest.files):
                on_sent = partial(offered.sent, index)
                lent = self._transport.lend_file(folder / file.name, on_sent, offered.in_memory)
                offered.lent.append(lent)
            offered.lent.append(self._transport.lend_view(len(manifest.chunks), offered.marks))
            offered.grants = [each.grant([(0, each.size)], GRANT_S) for each in offered.lent]
            subject = self._bus.subjects.weights(digest)
            offered.subscription = await self._bus.serve(subject, _queries, answer)
        except (OSError, BusError):
            await _end(offered)
            raise
        before, self._offered[digest] = self._offered.get(digest), offered
        self.manifests.keep(manifest)
        if self._transport.direct:
            self._tasks.start(self._show(offered), "show weights to NIXL")
        if not self._renewing:
            self._renewing = True
            self._tasks.start(self._renew(), "renew offers of weights")
        if before is not None:
            await _end(before)

    async def _show(self, offered: _Offered) -> None:
        """Register a copy in memory, file by file; what fails is read over TCP."""
        if offered.shown:
            return
        offered.shown = True
        for index, lent in enumerate(offered.lent):
            try:
                memory = offered.memory(index)
                if isinstance(lent, LentFile) and memory is not None:
                    await self._transport.show_file(lent, memory)
            except (TransferError, OSError) as error:
                log.warning("weights are sent over TCP: %s", error)
                return

    def _message(self, offered: _Offered) -> WeightOffer:
        *files, have = (grant.descriptor for grant in offered.grants)
        digest = offered.manifest.digest
        return WeightOffer(
            self._instance, digest, files, have, complete=offered.complete, node=self._node
        )

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            for offered in self._offered.values():
                offered.renew()


async def _end(offered: _Offered) -> None:
    if offered.subscription is not None:
        await offered.subscription.unsubscribe()
    for lent in offered.lent:
        lent.close()


def draw(query: str, instance: str) -> float:
    """A number in [0, 1) that differs for each query and instance."""
    digest = blake2b(f"{query} {instance}".encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2.0**48
