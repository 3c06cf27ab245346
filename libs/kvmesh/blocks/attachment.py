"""A worker's stay at the kvbm of its node: found in the directory, lost, and made again.

It is replaced as a whole: after any doubt about what the two sides hold of each other (a request
without an answer, a restart) its copies are let end, its lock is freed, and a new one is made.
"""

import asyncio
import logging
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from kvmesh.blocks.arena import WORKER_LOCKS, ArenaView, LivenessLock
from kvmesh.blocks.errors import BlocksError
from kvmesh.blocks.layout import KvLayout
from kvmesh.blocks.prompt_delta import SentPrompts
from kvmesh.bus.client import Bus
from kvmesh.bus.discovery import Directory
from kvmesh.bus.errors import BusError, MessageTooLarge, cause
from kvmesh.bus.kvbm import Attach, Attached, Declined, Detach, Done
from kvmesh.bus.messages import Instance, NodeStore, Role
from kvmesh.bus.streams import StreamLimits

log = logging.getLogger(__name__)
T = TypeVar("T")
REQUEST_S = 1.0  # a kvbm answers at once, or says in half of this that blocks are yet to come
DETACH_S = 1.0
QUIET_S = 10.0
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0


class Tenant(Struct, frozen=True, kw_only=True):
    """The worker that attaches; its kvbm is the one on the same `node`."""

    node: str
    instance: str
    model: str
    layout: KvLayout


class ArenaUser(Protocol):
    """What an engine does with the memory that it copies from and to."""

    async def adopt(self, arena: ArenaView) -> None:
        """Make ready to copy, for example by pinning."""
        ...

    async def release(self, arena: ArenaView) -> None:
        """Nothing is copied any more."""
        ...


class Replies(NamedTuple, Generic[T]):
    """The decoder of a reply that is a T unless the kvbm declines."""

    decoder: "msgspec.msgpack.Decoder[T | Declined]"


_attached: Replies[Attached] = Replies(msgspec.msgpack.Decoder(Attached | Declined))
_done: Replies[Done] = Replies(msgspec.msgpack.Decoder(Done | Declined))


class Attachment:
    """One stay. `users` are using it now; it ends when they are done."""

    def __init__(self, kvbm: str, attached: Attached, arena: ArenaView, lock: LivenessLock) -> None:
        self.kvbm = kvbm
        self.id = attached.attachment
        self.key = attached.key
        self.prompts = SentPrompts(attached.keeps)
        self.arena = arena
        self.lock = lock
        self.overdue = False
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the arena and all tickets while in this context."""
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def unused(self) -> None:
        """Wait until nobody uses it; TimeoutError after QUIET_S."""
        async with asyncio.timeout(QUIET_S):
            await self._unused.wait()

    def close(self) -> None:
        self.arena.close()
        self.lock.close()


class Attacher:
    """Keeps `current` an attachment to the node's kvbm; None while there is none."""

    def __init__(
        self, bus: Bus, limits: StreamLimits, tenant: Tenant, user: ArenaUser | None = None
    ) -> None:
        self._bus = bus
        self._tenant = tenant
        self._user = user
        self._directory = Directory(bus, limits, self._note, self._note)
        self._changed = asyncio.Event()
        self._refused: tuple[str, NodeStore | None] | None = None
        self._complaint = ""
        self._lost: list[Attachment] = []
        self._task: asyncio.Task[None] | None = None
        self.current: Attachment | None = None
        self.attached = 0

    async def open(self) -> None:
        """Begin to look for a kvbm; does not wait for one."""
        await self._directory.open()
        self._task = asyncio.create_task(self._keep(), name="attachment")

    async def close(self) -> None:
        """Leave the kvbm, once what is being copied is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.current is not None:
            self._lost.append(self.current)
            self.current = None
        await self._leave()
        await self._directory.close()

    def lose(self, attachment: Attachment, cause: object) -> None:
        """Something is wrong with it: use it no more, make another."""
        if self.current is not attachment:
            return
        log.warning("lost the block manager %s: %s", attachment.kvbm, cause)
        self.current = None
        self._lost.append(attachment)
        self._changed.set()

    async def ask(
        self,
        attachment: Attachment,
        message: object,
        replies: "Replies[T]",
        timeout: float = REQUEST_S,
    ) -> T | None:
        """The answer to a request, or None for whatever reason, which is logged."""
        try:
            answer = await self._send(attachment.kvbm, message, replies, timeout)
        except MessageTooLarge as error:
            log.warning("%s", error)
            return None
        except BusError as error:
            self.lose(attachment, error)
            return None
        if isinstance(answer, Declined):
            self._on_declined(attachment, answer)
            return None
        return answer

    async def _send(
        self,
        kvbm: str,
        message: object,
        replies: "Replies[T]",
        timeout: float,
    ) -> T | Declined:
        return await self._bus.request(
            self._bus.subjects.kvbm(kvbm), message, replies.decoder, timeout
        )

    def _on_declined(self, attachment: Attachment, declined: Declined) -> None:
        if declined.code in {"unknown", "closing"}:
            self.lose(attachment, declined.reason)
        else:
            log.warning("the block manager declined (%s): %s", declined.code, declined.reason)

    def _note(self, card: Instance) -> None:
        if card.role is Role.KVBM and card.node == self._tenant.node:
            self._changed.set()

    async def _keep(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            self._changed.clear()
            self._drop_if_gone()
            await self._leave()
            card = self._find()
            if self.current is not None or card is None:
                retry_s = FIRST_RETRY_S
                await self._pause(LAST_RETRY_S if self._lost else None)
            elif not await self._attach(card):
                await self._pause(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _pause(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def _drop_if_gone(self) -> None:
        if self.current is not None:
            present = {card.instance for card in self._directory.instances}
            if self.current.kvbm not in present:
                self.lose(self.current, "it has left")

    def _find(self) -> Instance | None:
        """The newest kvbm of this node that has not refused this worker for good."""
        here = [
            card
            for card in self._directory.instances
            if card.role is Role.KVBM and card.node == self._tenant.node and card.store is not None
        ]
        newest = max(here, key=lambda card: card.started, default=None)
        if newest is None or (newest.instance, newest.store) == self._refused:
            return None
        return newest

    async def _attach(self, card: Instance) -> bool:
        store = card.store
        if store is None:
            return False
        with ExitStack() as undo:
            try:
                attachment = await self._request(card, store, undo)
            except (BusError, BlocksError, OSError) as error:
                self._complain(f"cannot attach to {card.name}: {cause(error)}")
                return False
            if attachment is None:
                return False
            if self._user is not None:
                await self._user.adopt(attachment.arena)
            undo.pop_all()
        self.current = attachment
        self._complaint = ""
        self.attached += 1
        log.info("attached to %s, %d bytes shared", card.name, attachment.arena.size)
        return True

    async def _request(
        self, card: Instance, store: NodeStore, undo: ExitStack
    ) -> Attachment | None:
        tenant, directory = self._tenant, Path(store.directory)
        # not to be guessed: who names it is taken for somebody who may look into the directory
        name = WORKER_LOCKS.replace("*", f"{tenant.instance}-{secrets.token_hex(16)}")
        lock = LivenessLock(directory / name)
        undo.callback(lock.close)
        message = Attach(tenant.instance, tenant.model, tenant.layout, lock.path.name)
        answer = await self._send(card.instance, message, _attached, REQUEST_S)
        if isinstance(answer, Declined):
            self._on_refused(card, answer)
            return None
        arena = ArenaView(directory / Path(answer.arena).name, answer.arena_bytes)
        undo.callback(arena.close)
        return Attachment(card.instance, answer, arena, lock)

    def _on_refused(self, card: Instance, declined: Declined) -> None:
        self._complain(f"{card.name} does not take this worker: {declined.reason}")
        if declined.code in {"layout", "invalid"}:
            self._refused = card.instance, card.store

    def _complain(self, text: str) -> None:
        """Say why there is no attachment; while that stays so, once."""
        if text != self._complaint:
            log.warning("%s", text)
        self._complaint = text

    async def _leave(self) -> None:
        while self._lost:
            attachment = self._lost[0]
            try:
                await attachment.unused()
            except TimeoutError:
                if not attachment.overdue:
                    log.error("copies from %s do not end; still holding it", attachment.kvbm)
                attachment.overdue = True
                return
            self._lost.pop(0)
            await self._detach(attachment)

    async def _detach(self, attachment: Attachment) -> None:
        try:
            if self._user is not None:
                await self._user.release(attachment.arena)
            await self._send(attachment.kvbm, Detach(attachment.id), _done, DETACH_S)
        except (BusError, OSError) as error:
            log.debug("%s is left without a word: %s", attachment.kvbm, error)
        finally:
            attachment.close()
