"""The copy of weights that a starting worker takes, and its later offer."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import read_cards
from kvmesh.bus.discovery.compatibility import WITNESSES, Compatibility, Statements
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import Instance, Role, WeightOffer
from kvmesh.settings.schema import WeightsSettings
from kvmesh.transfer import Transport
from kvmesh.weights.answer import WeightsAnswer, write_answer
from kvmesh.weights.errors import CheckpointError, ManifestError, WeightsError, WeightsLost
from kvmesh.weights.frames import (
    DISK,
    STORE,
    WeightsCounts,
    WeightsFromDisk,
    WeightsJob,
    WeightsKnown,
    WeightsTaken,
)
from kvmesh.weights.manifest import Manifest
from kvmesh.weights.models.store_reader import StoreReader
from kvmesh.weights.process.fetching import WeightFetch
from kvmesh.weights.process.offers import Offers
from kvmesh.weights.process.own_files import OwnFiles
from kvmesh.weights.process.readers import DiskReader
from kvmesh.weights.process.search import REPLY_S, SourceSearch
from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.weights.stream import FetchOptions

log = logging.getLogger(__name__)
LOOK_S = 0.5  # between queries, and between looks at a copy that another process fetches
CARDS_S = 2.0  # between readings of all cards


async def digest_on_cards(bus: Bus, job: WeightsJob) -> str:
    """The digest on the oldest card of the model; empty if no card has one. Raises BusError.

    Where none that serves decides, the worker that has been asleep longest does. A worker that is
    pinned to a revision follows no card with another one.
    """
    cards = await read_cards(bus, Role.WORKER, Role.PARKED, *WITNESSES)
    workers, asleep = Compatibility(Statements(cards).of(job.model)), list[Instance]()
    for card in cards:
        if card.model is not None and card.model.name == job.model:
            workers.join(card)
        elif card.served is not None and card.served.name == job.model:
            asleep.append(card)
    asleep.sort(key=lambda card: (card.started, card.instance))
    for card in (*workers.fitting, *asleep):
        model = card.model or card.served
        if model is not None and model.weights and card.instance != job.instance:
            if job.revision and model.revision and model.revision != job.revision:
                continue
            return model.weights
    return ""


def stored_manifest(store: WeightStore, job: WeightsJob) -> Manifest | None:
    """The complete copy of a model that was used last on this node, found by its labels."""
    for manifest in reversed(store.list()):
        labels = (manifest.form, manifest.model, manifest.revision)
        if labels == ("checkpoint", job.model, job.revision):
            copy = store.open(manifest.digest)
            if copy is not None:
                complete = copy.complete
                copy.close()
                if complete:
                    return manifest
    return None


class CopyTaker:
    """Finds a copy, gives the loader its answer, and completes the copy."""

    def __init__(
        self,
        job: WeightsJob,
        settings: WeightsSettings,
        bus: Bus,
        offers: Offers,
        own: OwnFiles,
        send: Callable[[Struct], None],
        transport: Transport,
    ) -> None:
        self._job = job
        self._settings = settings
        self._bus = bus
        self._store: WeightStore | None = None
        self._offers = offers
        self._own = own
        self._transport = transport
        self._send = send
        self._copy: StoredCopy | None = None
        self._fetch: WeightFetch | None = None
        self._search: SourceSearch | None = None
        self._answered = bool(job.digest)
        self._trouble = ""  # in looking for a manifest

    async def run(self) -> None:
        """Return once the copy is complete, or the loader reads the disk."""
        on_disk = self._own.present()
        patience = self._settings.patience_s if on_disk else self._settings.wait_s
        try:
            reason = await self._choose(on_disk, patience)
            if not reason:
                await self._complete(patience)
        except (BusError, WeightsError, OSError) as error:
            reason = cause(error)
        if reason:
            await self._drop()
            if self._answered:
                log.warning("the engine's copy of the weights is given up: %s", reason)
            else:
                self._answer(WeightsAnswer(disk=reason))
                self._send(WeightsFromDisk(reason))
            if (known := await self._own.known()) is not None:
                await self._own.publish(known)

    async def engine_runs(self) -> None:
        """Offer what the engine has loaded, from the disk if the memory is not needed for it."""
        if self._copy is None:
            try:
                await self._own.publish(await self._own.digested())
            except CheckpointError as error:
                log.info("weights are not offered: %s", error)
        elif not self._copy.keep:
            known = await self._own.known()
            if known is None or known.digest != self._copy.manifest.digest:
                return
            if await self._own.publish(known):
                await self._drop()
            else:
                log.warning("the copy of the weights stays in memory, and is offered from there")

    def counts(self) -> WeightsCounts:
        """Bytes taken and failures so far."""
        fetch = self._fetch
        if fetch is None:
            return WeightsCounts()
        taken = {"peer": fetch.taken.total(), DISK: fetch.taken[DISK]}
        if self._job.pinned:
            taken[STORE] = fetch.taken[STORE]
        taken["peer"] -= fetch.taken[DISK] + fetch.taken[STORE]
        sources = 0 if self._copy is None or self._copy.complete else fetch.peers
        return WeightsCounts(taken=taken, failed=dict(fetch.failed), sources=sources)

    async def close(self) -> None:
        """End the use of the copy."""
        await self._drop()

    async def _choose(self, on_disk: bool, patience: float) -> str:
        """Answer with a copy and return nothing, or return the reason why there is none."""
        if not self._job.take:
            return "the engine loads its weights itself"
        settings, left = self._settings, self._job.digest
        store = await asyncio.to_thread(WeightStore, settings.directory, settings.max_bytes)
        self._store = store
        held = await asyncio.to_thread(store.open, left) if left else None
        try:
            await asyncio.to_thread(store.sweep)
            return await self._found(store, on_disk, patience)
        finally:
            if held is not None:
                held.close()

    async def _found(self, store: WeightStore, on_disk: bool, patience: float) -> str:
        settings, job = self._settings, self._job
        reason = f"no worker of {job.model} tells the digest of its weights"
        try:
            async with asyncio.timeout(patience):
                manifest = await self._manifest(store, on_disk)
            self._trouble = ""
            if manifest is None:
                return reason
            if on_disk and await self._own.differ(manifest):
                return f"{self._own.folder} has other weights than the workers of {job.model}"
            self._copy = copy = await asyncio.to_thread(store.create, manifest)
            if settings.keep:
                copy.set_keep()
            reason = f"no worker offers the weights of {job.model}"
            async with asyncio.timeout(patience):
                if not copy.complete and copy.fetch():
                    await self._begin_fetch(copy, on_disk)
                    while self._fetch is not None and not self._fetch.peers:
                        await self._look_around()
                        if self._job.pinned:  # the model store has all
                            break
        except TimeoutError:
            reason = self._trouble or reason
            return f"{reason} within {patience:g} s"
        self._answer(WeightsAnswer(manifest.digest, str(self._settings.directory)))
        return ""

    async def sweep(self) -> None:
        """Remove what other processes of the node left."""
        if self._store is not None:
            with suppress(WeightsError):
                await asyncio.to_thread(self._store.sweep)

    async def _manifest(self, store: WeightStore, on_disk: bool) -> Manifest | None:
        """The manifest of the weights to take; None if the files on the disk are as good.

        Only a worker without files on its disk waits for NATS, or for a manifest that is missing.
        """
        if self._job.loaded:
            return self._stored(store, self._job.digest)
        named = self._job.digest or self._job.pinned
        while True:
            try:
                if digest := named or await digest_on_cards(self._bus, self._job):
                    return self._stored(store, digest) or await self._own.manifests.get(digest)
                self._trouble = ""
            except (BusError, ManifestError) as error:
                if on_disk:
                    raise
                self._trouble = cause(error)
            if on_disk:
                known = await self._own.known()
                return known and self._stored(store, known.digest)
            if (stored := stored_manifest(store, self._job)) is not None:
                return stored
            await asyncio.sleep(CARDS_S)

    def _stored(self, store: WeightStore, digest: str) -> Manifest | None:
        """The manifest of a copy on this node."""
        copy = store.open(digest)
        if copy is None:
            return None
        try:
            return copy.manifest if copy.complete or copy.fetched or self._job.digest else None
        finally:
            copy.close()

    async def _begin_fetch(self, copy: StoredCopy, on_disk: bool) -> None:
        """Prepare to fetch the missing chunks; sources come once they are asked for."""
        manifest, instance = copy.manifest, self._job.instance
        options = FetchOptions(sources=self._settings.sources)

        def found(offer: WeightOffer) -> None:
            if self._fetch is not None:
                self._fetch.offer(offer)

        self._search = SourceSearch(self._bus, manifest, instance, found)
        await self._search.open()
        self._fetch = WeightFetch(copy, options, instance, self._search.ask, self._transport)
        if self._job.pinned == manifest.digest:
            self._fetch.add_store(StoreReader(self._bus, manifest))
        if on_disk:
            try:
                self._fetch.add_disk(DiskReader(self._own.folder, manifest))
            except CheckpointError as error:
                log.info("the disk is no source of these weights: %s", error)

    async def _look_around(self) -> None:
        """Ask for sources once."""
        if self._search is not None and self._fetch is not None:
            fetch = self._fetch
            await self._search.ask(lambda: fetch.peers > 0, REPLY_S)
            if not fetch.peers:
                await asyncio.sleep(LOOK_S)

    async def _complete(self, patience: float) -> None:
        """Fill the copy, or wait until another process of the node has; raises WeightsLost."""
        copy, began = self._copy, time.monotonic()
        assert copy is not None
        await self._offers.add_copy(copy)
        present, moved_at = copy.present, began
        try:
            while not copy.complete:
                if copy.fetch():
                    if self._fetch is None:
                        await self._begin_fetch(copy, self._own.present())
                    assert self._fetch is not None
                    await self._fetch.run(patience)
                    continue
                await asyncio.sleep(LOOK_S)
                if present != copy.present:
                    present, moved_at = copy.present, time.monotonic()
                elif time.monotonic() - moved_at > patience:
                    raise WeightsLost(f"another process has fetched no chunk for {patience:g} s")
        finally:
            copy.end_fetch()
            if self._search is not None:
                await self._search.close()
        await self._publish(copy.manifest)
        manifest, took_s, fetch = copy.manifest, time.monotonic() - began, self._fetch
        taken, direct = (dict(fetch.taken), fetch.direct_bytes) if fetch is not None else ({}, 0)
        self._send(WeightsTaken(manifest.digest, took_s, taken, manifest.size, direct))
        self._send(WeightsKnown(manifest.digest))

    async def _publish(self, manifest: Manifest) -> None:
        """Have the manifest in the mesh, from which it may have been removed as a former one."""
        try:
            await self._own.manifests.put(manifest)
        except BusError as error:
            log.warning("the manifest %s is not stored: %s", manifest.digest[:12], cause(error))

    def _answer(self, answer: WeightsAnswer) -> None:
        """Answer the loader; it keeps a first answer."""
        if not self._answered:
            self._answered = True
            write_answer(Path(self._job.answer_file), answer)

    async def _drop(self) -> None:
        copy, self._copy = self._copy, None
        if self._fetch is not None:
            await self._fetch.close()
        if self._search is not None:
            await self._search.close()
        if copy is not None:
            await self._offers.remove_copy(copy.manifest.digest)
            copy.close()
