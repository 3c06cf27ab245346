"""What a worker asks of the kvbm of its node. Without one, everything answers "nothing" at once.

Tickets are never left behind: whoever stops half-way, for whatever reason, has the rest of the
exchange done for him in the background.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from kvmesh.blocks.arena import ArenaView
from kvmesh.blocks.attachment import REQUEST_S, ArenaUser, Attacher, Attachment, Replies, Tenant
from kvmesh.blocks.digests import DIGEST_BYTES
from kvmesh.bus.client import Bus
from kvmesh.bus.kvbm import (
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
    Offer,
    Wanted,
)
from kvmesh.bus.messages import Retain
from kvmesh.bus.streams import StreamLimits

T = TypeVar("T")
AWAIT_S = 0.5


class _Replies(NamedTuple, Generic[T]):
    """Decoders of the replies to a whole prompt, and to one that the kvbm has to complete."""

    full: Replies[T]
    short: Replies[T | Incomplete]


_done: Replies[Done] = Replies(msgspec.msgpack.Decoder(Done | Declined))
_fetched: _Replies[Fetched] = _Replies(
    Replies(msgspec.msgpack.Decoder(Fetched | Declined)),
    Replies(msgspec.msgpack.Decoder(Fetched | Incomplete | Declined)),
)
_wanted: _Replies[Wanted] = _Replies(
    Replies(msgspec.msgpack.Decoder(Wanted | Declined)),
    Replies(msgspec.msgpack.Decoder(Wanted | Incomplete | Declined)),
)


class KvbmPrompt(Struct, frozen=True, kw_only=True):
    """The full blocks of a prompt, from its root on: one digest and two hashes each, packed.

    `salt` seeds the hashes; `retention` is in tokens of the prompt.
    """

    request: str
    digests: bytes
    sequence_hashes: bytes
    local: bytes
    salt: int
    tenant: str = ""
    session: str | None = None
    retention: list[Retain] = []

    @property
    def blocks(self) -> int:
        return len(self.sequence_hashes) // 8


class TierSpeeds(Struct, frozen=True, kw_only=True):
    """What an engine has measured, per second; 0 if it does not know."""

    compute_tps: float = 0.0
    load_bps: float = 0.0


class FetchedPart(Struct, frozen=True, kw_only=True):
    """Blocks `first` … of a prompt, in the arena until the iterator that gave it is closed.

    `tiers` says where each was, `retention` what they inherit.
    """

    attachment: Attachment
    ticket: int
    first: int
    offsets: "array[int]"
    checksums: "array[int]"
    tiers: bytes
    retention: list[Retain]

    @property
    def arena(self) -> ArenaView:
        return self.attachment.arena


class PendingWrite:
    """Blocks of a prompt that are wanted at these offsets of the arena.

    `checksums` is to have one for each of the leading blocks that have been written.
    """

    def __init__(self, arena: ArenaView, wanted: Wanted) -> None:
        self.arena = arena
        self.blocks = array("I", wanted.blocks)
        self.offsets = array("Q", wanted.offsets)
        self.checksums = array("Q")


class StoreClient:
    """One worker's way to the tiers below its engine."""

    def __init__(
        self, bus: Bus, limits: StreamLimits, tenant: Tenant, user: ArenaUser | None = None
    ) -> None:
        self.tenant = tenant
        self._attacher = Attacher(bus, limits, tenant, user)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def key(self) -> bytes | None:
        """The key of block digests; None without a kvbm."""
        attachment = self._attacher.current
        return attachment.key if attachment is not None else None

    @property
    def attachments(self) -> int:
        """How often this worker has attached."""
        return self._attacher.attached

    async def open(self) -> None:
        """Begin to look for the kvbm; does not wait for it."""
        await self._attacher.open()

    async def close(self) -> None:
        """Give everything back and leave."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=REQUEST_S)
        for task in self._tasks:
            task.cancel()
        await self._attacher.close()

    async def load(
        self,
        prompt: KvbmPrompt,
        held: int,
        speeds: TierSpeeds,
        wait_s: float,
        deadline_s: float,
        computes: bool = True,
    ) -> AsyncGenerator[FetchedPart, None]:
        """The blocks after the `held` leading ones, as they reach the arena.

        Waits up to `wait_s` for what others compute, and ends after `deadline_s` at the latest.
        What nobody has counts as computed by this worker until `computed`, if it `computes` that.
        Close the iterator to give the blocks back.
        """
        attachment = self._attacher.current
        if attachment is None:
            return
        ends = asyncio.get_running_loop().time() + deadline_s
        with attachment.in_use():
            fetch = _fetch(attachment, prompt, held, speeds, wait_s, computes)
            fetched = await self._ticket(attachment, fetch, _fetched, REQUEST_S)
            ticket, first = (fetched.ticket, held) if fetched is not None else (0, 0)
            try:
                while fetched is not None:
                    if fetched.offsets:
                        yield _part(attachment, ticket, first, fetched)
                    first += len(fetched.offsets) // 8
                    if not fetched.pending or asyncio.get_running_loop().time() > ends:
                        break
                    further = Await(attachment.id, ticket, AWAIT_S)
                    fetched = await self._ask(attachment, further, _fetched.full, REQUEST_S)
            finally:
                if ticket:
                    self._later(attachment, Finish(attachment.id, ticket))

    @asynccontextmanager
    async def writing(self, prompt: KvbmPrompt, first: int) -> AsyncIterator["PendingWrite | None"]:
        """What the kvbm wants of the blocks from `first` on, if anything.

        Ends with a commit of the blocks whose `checksums` have been filled in.
        """
        attachment = self._attacher.current
        if attachment is None:
            yield None
            return
        with attachment.in_use():
            offer = _offer(attachment, prompt, first)
            wanted = await self._ticket(attachment, offer, _wanted, REQUEST_S)
            if wanted is None or not wanted.ticket:
                yield None
                return
            writing = PendingWrite(attachment.arena, wanted)
            try:
                yield writing
            finally:
                checksums = writing.checksums.tobytes()
                self._later(attachment, Commit(attachment.id, wanted.ticket, checksums))

    def corrupt(self, part: FetchedPart, digests: bytes) -> None:
        """Tell of blocks whose content was not what it should be."""
        self._later(part.attachment, Corrupt(part.attachment.id, part.ticket, digests))

    def computed(self, request: str) -> None:
        """Tell that a request computes nothing more."""
        attachment = self._attacher.current
        if attachment is not None:
            self._later(attachment, Computed(attachment.id, request))

    async def _ask(
        self,
        attachment: Attachment,
        message: object,
        replies: Replies[T],
        timeout: float,
    ) -> T | None:
        with attachment.in_use():
            return await self._attacher.ask(attachment, message, replies, timeout)

    async def _describe(
        self, attachment: Attachment, message: Offer | Fetch, replies: _Replies[T], timeout: float
    ) -> T | None:
        """Ask about a prompt with what the kvbm does not know of it, or with all of it."""
        prompts = attachment.prompts
        short = prompts.shorten(message)
        answer = await self._ask(attachment, short, replies.short, timeout)
        if isinstance(answer, Incomplete):
            prompts.forget(short.base)
            short = message
            answer = await self._ask(attachment, message, replies.full, timeout)
        if answer is not None:
            prompts.sent(message.digests, short.base)
        return answer

    async def _ticket(
        self, attachment: Attachment, message: Offer | Fetch, replies: _Replies[T], timeout: float
    ) -> T | None:
        """What comes of it; a ticket whose asker is cancelled meanwhile is given back."""
        question = self._describe(attachment, message, replies, timeout)
        asking = self._spawn(question)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(partial(self._give_up, attachment))
            raise

    def _give_up(self, attachment: Attachment, asking: "asyncio.Task[object]") -> None:
        answer = None if asking.cancelled() else asking.result()
        if isinstance(answer, Fetched) and answer.ticket:
            self._later(attachment, Finish(attachment.id, answer.ticket))
        elif isinstance(answer, Wanted) and answer.ticket:
            self._later(attachment, Commit(attachment.id, answer.ticket, b""))

    def _later(self, attachment: Attachment, message: object) -> None:
        question = self._ask(attachment, message, _done, REQUEST_S)
        self._spawn(question)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _fetch(
    attachment: Attachment,
    prompt: KvbmPrompt,
    held: int,
    speeds: TierSpeeds,
    wait_s: float,
    computes: bool,
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
        computes=computes,
        tenant=prompt.tenant,
        session=prompt.session,
        retention=prompt.retention,
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
    )


def _part(attachment: Attachment, ticket: int, first: int, fetched: Fetched) -> FetchedPart:
    return FetchedPart(
        attachment=attachment,
        ticket=ticket,
        first=first,
        offsets=array("Q", fetched.offsets),
        checksums=array("Q", fetched.checksums),
        tiers=fetched.tiers,
        retention=fetched.retention,
    )


def digest_of(prompt: KvbmPrompt, block: int) -> bytes:
    """The digest of one block of a prompt."""
    return prompt.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
