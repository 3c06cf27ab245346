"""A worker's attachment to the kvbm of its node: discovery, loss and replacement.

An attachment is replaced as a whole: when the states of the two sides may differ (after a request
without a reply, or a restart), the worker lets its copies end, frees its lock and attaches again.
"""

import asyncio
import logging
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from kvmesh.blocks.arena import WORKER_LOCKS, ArenaView, LivenessLock
from kvmesh.blocks.errors import BlocksError
from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.errors import BusError, MessageTooLarge, cause
from kvmesh.bus.messages import (
    Attach,
    Attached,
    Declined,
    Detach,
    Done,
    Instance,
    KvLayout,
    MessageDecoder,
    NodeStore,
    Role,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.prompt_delta.blocks import SentBlockPromptCache

log = logging.getLogger(__name__)
T = TypeVar("T")
REQUEST_S = 1.0  # a kvbm replies at once, or with pending blocks after half of this
DETACH_S = 1.0
QUIET_S = 10.0
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0


class WorkerIdentity(Struct, frozen=True, kw_only=True):
    """The worker that attaches, to the kvbm on the same `node`."""

    node: str
    instance: str
    model: str
    layout: KvLayout


class ArenaUser(Protocol):
    """An engine that copies from and to the arena."""

    async def adopt(self, arena: ArenaView) -> None:
        """Prepare for copying, for example by pinning the memory."""
        ...

    async def release(self, arena: ArenaView) -> None:
        """Undo `adopt`: copying has ended."""
        ...


class Replies(NamedTuple, Generic[T]):
    """The decoder of a reply that is a T unless the kvbm declines."""

    decoder: MessageDecoder[T | Declined]


_attached: Replies[Attached] = Replies(MessageDecoder(Attached | Declined))
_done: Replies[Done] = Replies(MessageDecoder(Done | Declined))


class Attachment:
    """One attachment; once lost, it ends when no copy uses it."""

    def __init__(self, kvbm: str, attached: Attached, arena: ArenaView, lock: LivenessLock) -> None:
        self.kvbm = kvbm
        self.id = attached.attachment
        self.key = attached.key
        self.prompts = SentBlockPromptCache(attached.prompt_blocks)
        self.arena = arena
        self.lock = lock
        self.overdue = False
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the arena mapped and all tickets valid within this context."""
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def wait_unused(self) -> None:
        """Wait until no context uses the attachment; TimeoutError after QUIET_S."""
        async with asyncio.timeout(QUIET_S):
            await self._unused.wait()

    def close(self) -> None:
        self.arena.close()
        self.lock.close()


class Attacher:
    """Maintains `current`, the attachment to the node's kvbm; None while there is none."""

    def __init__(
        self, bus: Bus, limits: StreamLimits, worker: WorkerIdentity, user: ArenaUser | None = None
    ) -> None:
        self._bus = bus
        self._worker = worker
        self._user = user
        self._directory = Directory(bus, limits, self._on_card, self._on_card)
        self._changed = asyncio.Event()
        self._refused: tuple[str, NodeStore | None] | None = None
        self._last_warning = ""
        self._lost: list[Attachment] = []
        self._task: asyncio.Task[None] | None = None
        self.current: Attachment | None = None
        self.attached = 0

    async def open(self) -> None:
        """Start to look for a kvbm; does not wait for one."""
        await self._directory.open()
        self._task = asyncio.create_task(self._maintain(), name="attachment")

    async def close(self) -> None:
        """Detach from the kvbm once running copies have ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.current is not None:
            self._lost.append(self.current)
            self.current = None
        await self._detach_lost()
        await self._directory.close()

    def lose(self, attachment: Attachment, cause: object) -> None:
        """Abandon a faulty attachment and make another."""
        if self.current is not attachment:
            return
        log.warning("lost the kvbm %s: %s", attachment.kvbm, cause)
        self.current = None
        self._lost.append(attachment)
        self._changed.set()

    async def request(
        self,
        attachment: Attachment,
        message: object,
        replies: "Replies[T]",
        timeout: float = REQUEST_S,
    ) -> T | None:
        """Send a request; return the reply, or None after any failure, which is logged."""
        try:
            reply = await self._send(attachment.kvbm, message, replies, timeout)
        except MessageTooLarge as error:
            log.warning("%s", error)
            return None
        except BusError as error:
            self.lose(attachment, error)
            return None
        if isinstance(reply, Declined):
            self._on_declined(attachment, reply)
            return None
        return reply

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
            log.warning("the kvbm declined (%s): %s", declined.code, declined.reason)

    def _on_card(self, card: Instance) -> None:
        if card.role is Role.KVBM and card.node == self._worker.node:
            self._changed.set()

    async def _maintain(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            self._changed.clear()
            self._drop_if_departed()
            await self._detach_lost()
            card = self._find_kvbm()
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

    def _drop_if_departed(self) -> None:
        if self.current is not None:
            present = {card.instance for card in self._directory.instances}
            if self.current.kvbm not in present:
                self.lose(self.current, "it has left")

    def _find_kvbm(self) -> Instance | None:
        """Return the newest kvbm of this node that has not refused this worker for good."""
        here = [
            card
            for card in self._directory.instances
            if card.role is Role.KVBM and card.node == self._worker.node and card.store is not None
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
                attachment = await self._request_attachment(card, store, undo)
            except (BusError, BlocksError, OSError) as error:
                self._warn_once(f"cannot attach to {card.name}: {cause(error)}")
                return False
            if attachment is None:
                return False
            if self._user is not None:
                await self._user.adopt(attachment.arena)
            undo.pop_all()
        self.current = attachment
        self._last_warning = ""
        self.attached += 1
        log.info("attached to %s, %d bytes shared", card.name, attachment.arena.size)
        return True

    async def _request_attachment(
        self, card: Instance, store: NodeStore, undo: ExitStack
    ) -> Attachment | None:
        worker, directory = self._worker, Path(store.directory)
        # unguessable: a worker proves access to the directory by naming its lock
        name = WORKER_LOCKS.replace("*", f"{worker.instance}-{secrets.token_hex(16)}")
        lock = LivenessLock(directory / name)
        undo.callback(lock.close)
        message = Attach(worker.instance, worker.model, worker.layout, lock.path.name)
        reply = await self._send(card.instance, message, _attached, REQUEST_S)
        if isinstance(reply, Declined):
            self._on_refused(card, reply)
            return None
        arena = ArenaView(directory / Path(reply.arena).name, reply.arena_bytes)
        undo.callback(arena.close)
        return Attachment(card.instance, reply, arena, lock)

    def _on_refused(self, card: Instance, declined: Declined) -> None:
        self._warn_once(f"{card.name} refused this worker: {declined.reason}")
        if declined.code in {"layout", "invalid"}:
            self._refused = card.instance, card.store

    def _warn_once(self, text: str) -> None:
        """Log a reason for having no attachment, once while it lasts."""
        if text != self._last_warning:
            log.warning("%s", text)
        self._last_warning = text

    async def _detach_lost(self) -> None:
        while self._lost:
            attachment = self._lost[0]
            try:
                await attachment.wait_unused()
            except TimeoutError:
                if not attachment.overdue:
                    log.error(
                        "copies from or to %s do not end; its arena stays mapped", attachment.kvbm
                    )
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
            log.debug("detaching from %s failed: %s", attachment.kvbm, error)
        finally:
            attachment.close()
