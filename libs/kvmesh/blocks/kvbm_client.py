"""Client of the node's kvbm for one worker. Without a kvbm every call returns nothing at once.

Tickets never leak: when a caller is cancelled or fails, the client completes the exchange in the
background.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct

from kvmesh.blocks.arena import ArenaView
from kvmesh.blocks.attachment import (
    REQUEST_S,
    ArenaUser,
    Attacher,
    Attachment,
    Replies,
    WorkerIdentity,
)
from kvmesh.blocks.overlapped_load import relative_time
from kvmesh.bus.client import Bus
from kvmesh.bus.messages import (
    Await,
    Commit,
    Computed,
    Corrupt,
    Declined,
    Done,
    Fetch,
    Fetched,
    Finish,
    Incomplete,
    KvLayout,
    MessageDecoder,
    Offer,
    Retain,
    Wanted,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.hashing import DIGEST_BYTES, HASH_BYTES
from kvmesh.runtime.background import BackgroundTasks

T = TypeVar("T")
AWAIT_S = 0.5


class _Replies(NamedTuple, Generic[T]):
    """Decoders of the replies to a whole prompt, and to one that the kvbm has to complete."""

    full: Replies[T]
    short: Replies[T | Incomplete]


_done: Replies[Done] = Replies(MessageDecoder(Done | Declined))
_fetched: _Replies[Fetched] = _Replies(
    Replies(MessageDecoder(Fetched | Declined)),
    Replies(MessageDecoder(Fetched | Incomplete | Declined)),
)
_wanted: _Replies[Wanted] = _Replies(
    Replies(MessageDecoder(Wanted | Declined)),
    Replies(MessageDecoder(Wanted | Incomplete | Declined)),
)


class KvbmPrompt(Struct, frozen=True, kw_only=True):
    """The full blocks of a prompt from its root: one digest and two hashes each, packed.

    `salt` seeds the hashes; `retention` is in tokens of the prompt. `traceparent` is that of a
    traced request. Blocks of an `ephemeral` request are loaded, but not offered. `conversation` and
    `tentative` are as in `Offer`.
    """

    request: str
    digests: bytes
    sequence_hashes: bytes
    local: bytes
    salt: int
    tenant: str = ""
    session: str | None = None
    retention: list[Retain] = []
    traceparent: str = ""
    ephemeral: bool = False
    conversation: int = 0
    tentative: bool = False

    @property
    def blocks(self) -> int:
        return len(self.sequence_hashes) // HASH_BYTES


class TierSpeeds(Struct, frozen=True, kw_only=True):
    """Measured speeds of an engine: tokens computed and bytes loaded per second; 0 if unknown."""

    compute_tps: float = 0.0
    load_bps: float = 0.0

    def load_ratio(self, layout: KvLayout) -> float:
        """The time to get a block of the node over the time to compute it; 0 if unknown."""
        if not (self.compute_tps and self.load_bps):
            return 0.0
        alone = layout.block_bytes * self.compute_tps / (self.load_bps * layout.block_size)
        return relative_time(alone)


class FetchedPart(Struct, frozen=True, kw_only=True):
    """Blocks of a prompt from index `first` on, in the arena until the iterator is closed.

    `tiers` are the tiers that the blocks came from; `retention` is what they inherit. More parts
    follow if blocks are `pending`.
    """

    attachment: Attachment
    ticket: int
    first: int
    offsets: "array[int]"
    checksums: "array[int]"
    tiers: bytes
    retention: list[Retain]
    pending: bool

    @property
    def arena(self) -> ArenaView:
        return self.attachment.arena


class PendingWrite:
    """Blocks of a prompt that the kvbm wants at these offsets of the arena.

    The caller sets `checksums`, one for each leading block that it has written.
    """

    def __init__(self, arena: ArenaView, wanted: Wanted) -> None:
        self.arena = arena
        self.blocks = array("I", wanted.blocks)
        self.offsets = array("Q", wanted.offsets)
        self.checksums = array("Q")


class KvbmClient:
    """Loads and stores blocks of one worker's engine in the tiers of its node's kvbm."""

    def __init__(
        self, bus: Bus, limits: StreamLimits, worker: WorkerIdentity, user: ArenaUser | None = None
    ) -> None:
        self.worker = worker
        self._attacher = Attacher(bus, limits, worker, user)
        self._tasks = BackgroundTasks()

    @property
    def key(self) -> bytes | None:
        """The key of block digests; None without a kvbm."""
        attachment = self._attacher.current
        return attachment.key if attachment is not None else None

    @property
    def attachments(self) -> int:
        """Number of attachments so far."""
        return self._attacher.attached

    async def open(self) -> None:
        """Start to look for the kvbm; does not wait for it."""
        await self._attacher.open()

    async def close(self) -> None:
        """Return all tickets and detach."""
        await self._tasks.wait(REQUEST_S)
        self._tasks.cancel()
        await self._attacher.close()

    async def load(
        self,
        prompt: KvbmPrompt,
        held: int,
        speeds: TierSpeeds,
        wait_s: float,
        deadline_s: float,
        computes: bool = True,
        overlaps: bool = False,
    ) -> AsyncGenerator[FetchedPart, None]:
        """Yield the blocks after the `held` leading ones as they reach the arena.

        Waits up to `wait_s` for blocks that other workers are computing, and at most `deadline_s`
        in all. With `computes`, this worker is recorded as computing the missing blocks until
        `report_computed`, unless it will not offer them. Close the iterator to return the blocks.
        With `overlaps`, the worker computes meanwhile; the last part, which may be empty, has
        nothing `pending`, unless the kvbm is gone.
        """
        attachment = self._attacher.current
        if attachment is None:
            return
        deadline = asyncio.get_running_loop().time() + deadline_s
        with attachment.in_use():
            fetch = _fetch(attachment, prompt, held, speeds, wait_s, computes, overlaps)
            fetched = await self._request_ticket(attachment, fetch, _fetched, REQUEST_S)
            ticket, first = (fetched.ticket, held) if fetched is not None else (0, 0)
            try:
                while fetched is not None:
                    late = asyncio.get_running_loop().time() > deadline
                    pending = fetched.pending > 0 and not late
                    if fetched.offsets or (overlaps and not pending):
                        yield _part(attachment, ticket, first, fetched, pending)
                    first += len(fetched.offsets) // 8
                    if not pending:
                        break
                    further = Await(attachment.id, ticket, AWAIT_S)
                    fetched = await self._request(attachment, further, _fetched.full, REQUEST_S)
            finally:
                if ticket:
                    self._post(attachment, Finish(attachment.id, ticket))

    @asynccontextmanager
    async def writing(self, prompt: KvbmPrompt, first: int) -> AsyncIterator["PendingWrite | None"]:
        """Offer the blocks from `first` on; yields those that the kvbm wants, None if none.

        On exit commits the blocks whose `checksums` the caller has set.
        """
        attachment = self._attacher.current
        if attachment is None:
            yield None
            return
        with attachment.in_use():
            offer = _offer(attachment, prompt, first)
            wanted = await self._request_ticket(attachment, offer, _wanted, REQUEST_S)
            if wanted is None or not wanted.ticket:
                yield None
                return
            writing = PendingWrite(attachment.arena, wanted)
            try:
                yield writing
            finally:
                checksums = writing.checksums.tobytes()
                self._post(attachment, Commit(attachment.id, wanted.ticket, checksums))

    def report_corrupt(self, part: FetchedPart, digests: bytes) -> None:
        """Report blocks with wrong content."""
        self._post(part.attachment, Corrupt(part.attachment.id, part.ticket, digests))

    def report_computed(self, request: str) -> None:
        """Report that a request computes no more blocks."""
        attachment = self._attacher.current
        if attachment is not None:
            self._post(attachment, Computed(attachment.id, request))

    async def _request(
        self, attachment: Attachment, message: object, replies: Replies[T], timeout: float
    ) -> T | None:
        with attachment.in_use():
            return await self._attacher.request(attachment, message, replies, timeout)

    async def _send_prompt(
        self, attachment: Attachment, message: Offer | Fetch, replies: _Replies[T], timeout: float
    ) -> T | None:
        """Send a prompt as a delta; send it whole if the kvbm has evicted the base."""
        prompts = attachment.prompts
        short = prompts.shorten(message)
        reply = await self._request(attachment, short, replies.short, timeout)
        if isinstance(reply, Incomplete):
            prompts.forget(short.base)
            short = message
            reply = await self._request(attachment, message, replies.full, timeout)
        if reply is not None:
            prompts.store(message.digests, short.base)
        return reply

    async def _request_ticket(
        self, attachment: Attachment, message: Offer | Fetch, replies: _Replies[T], timeout: float
    ) -> T | None:
        """Send a prompt; if the caller is cancelled meanwhile, return the ticket."""
        work = self._send_prompt(attachment, message, replies, timeout)
        sending = self._tasks.start(work, awaited=True)
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            sending.add_done_callback(partial(self._return_ticket, attachment))
            raise

    def _return_ticket(self, attachment: Attachment, sending: "asyncio.Task[object]") -> None:
        reply = None if sending.cancelled() else sending.result()
        if isinstance(reply, Fetched) and reply.ticket:
            self._post(attachment, Finish(attachment.id, reply.ticket))
        elif isinstance(reply, Wanted) and reply.ticket:
            self._post(attachment, Commit(attachment.id, reply.ticket, b""))

    def _post(self, attachment: Attachment, message: object) -> None:
        work = self._request(attachment, message, _done, REQUEST_S)
        self._tasks.start(work)


def _fetch(
    attachment: Attachment,
    prompt: KvbmPrompt,
    held: int,
    speeds: TierSpeeds,
    wait_s: float,
    computes: bool,
    overlaps: bool,
) -> Fetch:
    return Fetch(
        attachment=attachment.id,
        request=prompt.request,
        held=held,
        digests=prompt.digests,
        sequence_hashes=prompt.sequence_hashes,
        local=prompt.local,
        salt=prompt.salt,
        compute_tps=speeds.compute_tps,
        load_bps=speeds.load_bps,
        wait_s=wait_s,
        computes=computes and not prompt.ephemeral,
        tenant=prompt.tenant,
        session=prompt.session,
        retention=prompt.retention,
        traceparent=prompt.traceparent,
        overlaps=overlaps,
        conversation=prompt.conversation,
        tentative=prompt.tentative,
    )


def _offer(attachment: Attachment, prompt: KvbmPrompt, first: int) -> Offer:
    return Offer(
        attachment=attachment.id,
        first=first,
        digests=prompt.digests,
        sequence_hashes=prompt.sequence_hashes,
        local=prompt.local,
        salt=prompt.salt,
        tenant=prompt.tenant,
        session=prompt.session,
        retention=prompt.retention,
        traceparent=prompt.traceparent,
        request=prompt.request,
        conversation=prompt.conversation,
        tentative=prompt.tentative,
    )


def _part(
    attachment: Attachment, ticket: int, first: int, fetched: Fetched, pending: bool
) -> FetchedPart:
    return FetchedPart(
        attachment=attachment,
        ticket=ticket,
        first=first,
        offsets=array("Q", fetched.offsets),
        checksums=array("Q", fetched.checksums),
        tiers=fetched.tiers,
        retention=fetched.retention,
        pending=pending,
    )


def digest_of(prompt: KvbmPrompt, block: int) -> bytes:
    """Return the digest of one block of a prompt."""
    return prompt.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
