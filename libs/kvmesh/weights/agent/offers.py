"""The copies that a weights process offers to others."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvmesh.bus.client import Bus, Reply, Subscription
from kvmesh.bus.messages import MessageDecoder, WeightOffer, WeightQuery
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.transfer import Grant, LentFile, Region, Transport
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.stored_copy import StoredCopy

log = logging.getLogger(__name__)
GRANT_S = 60.0  # after which no byte is sent if this process has stopped renewing
RENEW_S = 20.0
_queries = MessageDecoder(WeightQuery)


@dataclass
class _Offered:
    """A copy that others may read."""

    manifest: Manifest
    lent: list[LentFile | Region]
    grants: list[Grant]
    have: Grant | None
    complete: Callable[[], bool]
    subscription: Subscription | None = None


class Offers:
    """Replies to queries for the copies that were added."""

    def __init__(self, bus: Bus, transport: Transport, instance: str, node: str) -> None:
        self._bus = bus
        self._transport = transport
        self._instance = instance
        self._node = node
        self._offered: dict[str, _Offered] = {}
        self._tasks = BackgroundTasks()
        self._renewing = False

    async def add_copy(self, copy: StoredCopy) -> None:
        """Offer a copy in memory, also while it is incomplete; raises OSError or BusError."""
        region = self._transport.register(copy.have)
        have = region.grant([(0, region.size)], GRANT_S)
        paths = [copy.folder / file.name for file in copy.manifest.files]
        await self._add(copy.manifest, paths, lambda: copy.complete, [region], have)

    async def add_files(self, manifest: Manifest, folder: Path) -> None:
        """Offer the files of a model folder, which the manifest describes."""
        paths = [folder / file.name for file in manifest.files]
        await self._add(manifest, paths, lambda: True, [], None)

    async def remove(self, digest: str) -> None:
        """End the offer of a copy; what others read of it ends at once."""
        offered = self._offered.pop(digest, None)
        if offered is not None:
            if offered.subscription is not None:
                await offered.subscription.unsubscribe()
            for lent in offered.lent:
                lent.close()

    async def close(self) -> None:
        await self._tasks.close()
        for digest in list(self._offered):
            await self.remove(digest)

    async def _add(
        self,
        manifest: Manifest,
        paths: list[Path],
        complete: Callable[[], bool],
        lent: list[LentFile | Region],
        have: Grant | None,
    ) -> None:
        await self.remove(manifest.digest)
        files = [self._transport.lend_file(path, in_memory=have is not None) for path in paths]
        grants = [file.grant([(0, file.size)], GRANT_S) for file in files]
        offered = _Offered(manifest, [*lent, *files], grants, have, complete)
        if not self._renewing:
            self._renewing = True
            self._tasks.start(self._renew(), "renew offers of weights")
        self._offered[manifest.digest] = offered

        def answer(query: WeightQuery, reply: Reply) -> None:
            if (
                query.instance != self._instance
                and query.above <= draw(query.query, self._instance) < query.share
            ):
                reply(self._message(offered))

        subject = self._bus.subjects.weights(manifest.digest)
        offered.subscription = await self._bus.serve(subject, _queries, answer)

    def _message(self, offered: _Offered) -> WeightOffer:
        complete = offered.complete()
        return WeightOffer(
            self._instance,
            offered.manifest.digest,
            [grant.descriptor for grant in offered.grants],
            complete=complete,
            have=b"" if complete or offered.have is None else offered.have.descriptor,
            node=self._node,
        )

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            for offered in self._offered.values():
                for grant in (*offered.grants, *([offered.have] if offered.have else [])):
                    grant.expire_in(GRANT_S)


def draw(query: str, instance: str) -> float:
    """A number in [0, 1) that differs for each query and instance."""
    digest = blake2b(f"{query} {instance}".encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2.0**48
