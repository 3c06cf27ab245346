"""A minimal block manager for tests of its clients: one tier, no eviction, no policy.

Tests change its state: requests of `silent` types get no reply, and entries of `prompts` can be
removed.
"""

import fcntl
import itertools
import os
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.blocks.digests import split_digests
from kvmesh.bus.client import Bus, Reply, Subscription
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.messages import (
    Attach,
    Attached,
    Await,
    Commit,
    Corrupt,
    Declined,
    Detach,
    Done,
    Fetch,
    Fetched,
    Finish,
    Incomplete,
    Instance,
    KvbmRequest,
    Lend,
    MessageDecoder,
    NodeStore,
    Offer,
    Prepare,
    Role,
    Wanted,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.prompt_delta.blocks import BlockHashes, BlockPromptCache

KEY = bytes(range(32))
Requests = MessageDecoder[KvbmRequest]


@dataclass
class SmallKvbm:
    """`blocks` maps digests to (offset, checksum); `requests` lists all requests."""

    bus: Bus
    limits: StreamLimits
    folder: Path
    node: str = "here"
    instance: str = "kvbm-1"
    slots: int = 256
    part: int = 4
    declines: Declined | None = None
    silent: set[type] = field(default_factory=set)
    requests: list[KvbmRequest] = field(default_factory=list)
    blocks: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    stored_prompts: int = 1 << 16
    attached: dict[int, Attach] = field(default_factory=dict)
    prompts: dict[int, BlockPromptCache] = field(default_factory=dict)
    tickets: dict[int, list[bytes]] = field(default_factory=dict)
    served: dict[int, int] = field(default_factory=dict)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    used: int = 0
    stopped: bool = False

    async def start(self) -> None:
        self.arena.touch()
        os.truncate(self.arena, 1 << 22)
        decoder: Requests = MessageDecoder(KvbmRequest)
        subject = self.bus.subjects.kvbm(self.instance)
        self.subscription: Subscription = await self.bus.serve(subject, decoder, self._serve)
        store = NodeStore(directory=str(self.folder), tier_bytes=[1 << 22, 0, 0])
        self.lease = Lease(
            self.bus,
            Instance(
                instance=self.instance,
                role=Role.KVBM,
                name="kvbm",
                version="0",
                started=time.time(),
                node=self.node,
                store=store,
            ),
            self.limits,
        )
        await self.lease.open()

    async def stop(self) -> None:
        if self.stopped:
            return
        self.stopped = True
        await self.lease.close()
        await self.subscription.unsubscribe()

    @property
    def arena(self) -> Path:
        return self.folder / f"{self.instance}.arena"

    def count(self, kind: type) -> int:
        return sum(isinstance(request, kind) for request in self.requests)

    def locked(self, attachment: int) -> bool:
        """True while the worker holds the lock file named in its `Attach`."""
        path = self.folder / self.attached[attachment].lock
        if not path.exists():
            return False
        with path.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    async def _serve(self, request: KvbmRequest, reply: Reply) -> None:
        self.requests.append(request)
        if type(request) not in self.silent:
            reply(self._answer(request))

    def _answer(self, request: KvbmRequest) -> object:
        if isinstance(request, Attach):
            if self.declines is not None:
                return self.declines
            number = next(self.numbers)
            self.attached[number] = request
            self.prompts[number] = BlockPromptCache(self.stored_prompts)
            return Attached(number, self.arena.name, 1 << 22, KEY, self.stored_prompts)
        if isinstance(request, Lend | Prepare):
            return Declined("invalid", "this node lends no memory")
        if request.attachment not in self.attached:
            return Declined("unknown", "who are you?")
        return self._do(request)

    def _do(self, request: KvbmRequest) -> object:
        match request:
            case Offer() | Fetch():
                return self._describe(request)
            case Commit(_, ticket, checksums):
                return self._commit(ticket, array("Q", checksums))
            case Await(_, ticket, _):
                return self._next(ticket)
            case Finish(_, ticket):
                del self.tickets[ticket]
            case Corrupt(_, _, digests):
                for digest in split_digests(digests):
                    del self.blocks[digest]
            case Detach(attachment):
                del self.attached[attachment]
        return Done()

    def _describe(self, request: Offer | Fetch) -> object:
        prompts = self.prompts[request.attachment]
        rest = BlockHashes(request.digests, request.sequence_hashes, request.local)
        prompt = prompts.complete(request.base, request.shared, rest)
        if prompt is None:
            return Incomplete()
        prompts.store(prompt, request.base)
        digests = split_digests(prompt.digests)
        if isinstance(request, Offer):
            return self._offer(request, digests)
        return self._fetch(request, digests)

    def _offer(self, offer: Offer, digests: list[bytes]) -> Wanted:
        wanted = [i for i in range(offer.first, len(digests)) if digests[i] not in self.blocks]
        if not wanted:
            return Wanted(0, b"", b"")
        size = self.attached[offer.attachment].layout.block_bytes
        offsets = array("Q", range(self.used, self.used + size * len(wanted), size))
        self.used += size * len(wanted)
        ticket = next(self.numbers)
        self.tickets[ticket] = [
            digests[i] + offset.to_bytes(8, "little")
            for i, offset in zip(wanted, offsets, strict=True)
        ]
        return Wanted(ticket, array("I", wanted).tobytes(), offsets.tobytes())

    def _commit(self, ticket: int, checksums: "array[int]") -> Done:
        for named, checksum in zip(self.tickets.pop(ticket), checksums, strict=False):
            self.blocks[named[:16]] = (int.from_bytes(named[16:], "little"), checksum)
        return Done(len(checksums))

    def _fetch(self, fetch: Fetch, digests: list[bytes]) -> Fetched:
        found = list(itertools.takewhile(self.blocks.__contains__, digests[fetch.held :]))
        if not found:
            return Fetched(0, b"", b"", b"")
        ticket = next(self.numbers)
        self.tickets[ticket] = found
        self.served[ticket] = 0
        return self._next(ticket)

    def _next(self, ticket: int) -> Fetched:
        digests, start = self.tickets[ticket], self.served[ticket]
        part = digests[start : start + self.part]
        self.served[ticket] += len(part)
        locations = [self.blocks[digest] for digest in part]
        return Fetched(
            ticket,
            array("Q", [offset for offset, _ in locations]).tobytes(),
            array("Q", [checksum for _, checksum in locations]).tobytes(),
            bytes([1]) * len(part),
            len(digests) - start - len(part),
        )
