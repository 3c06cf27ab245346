"""Server for the workers of the node and the kvbms of other nodes."""

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from kvmesh.bus.client import Bus, Reply, Subscription
from kvmesh.bus.messages import (
    Attach,
    Attached,
    Declined,
    Fetch,
    KvbmRequest,
    Lend,
    MessageDecoder,
    Offer,
    Prepare,
)
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import Space
from kvmesh.kvbm.core.errors import TooSmall
from kvmesh.kvbm.core.manager import Manager, ParkedFetch
from kvmesh.kvbm.peers.lender import Lender
from kvmesh.kvbm.request_trace import traced
from kvmesh.kvbm.tiers.arena import Arena
from kvmesh.kvbm.tiers.node_directory import NodeDirectory

log = logging.getLogger(__name__)
ATTACHMENT_BITS = 62
ENDED = Declined("invalid", "the ticket has ended")
REPLACED = Declined("invalid", "a newer request for the ticket has replaced this one")
_decoder: MessageDecoder[KvbmRequest] = MessageDecoder(KvbmRequest)


class WorkerServer:
    """Replies to workers from the manager, and to other kvbms from `lender`.

    Calls `settle` after each change of the manager's state. `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        bus: Bus,
        manager: Manager,
        directory: NodeDirectory,
        arena: Arena,
        key: bytes,
        settle: Callable[[], None],
        lender: Lender,
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._manager = manager
        self._directory = directory
        self._arena = arena
        self._key = key
        self._settle = settle
        self._lender = lender
        self._clock = clock
        self._parked: dict[int, Reply] = {}
        self._logged_spaces: set[Space] = set()
        self._logged_layouts: set[tuple[str, ...]] = set()
        self._subscription: Subscription | None = None
        self.requests = 0
        self.malformed = 0

    async def open(self, subject: str) -> None:
        self._subscription = await self._bus.serve(
            subject, _decoder, self._receive, on_malformed=self._on_malformed
        )

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def send_due(self) -> None:
        """Send the replies to parked requests that are due or whose tickets have ended."""
        replies: dict[int, object] = {**self._manager.drain_replies(self._clock())}
        ended = self._parked.keys() - self._manager.onboarding.tickets.keys() - replies.keys()
        for ticket, reply in (replies | dict.fromkeys(ended, ENDED)).items():
            send = self._parked.pop(ticket, None)
            if send is not None:
                send(reply)

    def reclaim(self) -> None:
        """Detach workers whose locks are free, and reclaim their tickets."""
        workers = self._manager.attachments.workers
        for worker in list(workers.values()):
            if not self._directory.is_held(worker.lock):
                tickets = self._manager.detach(worker, self._clock())
                reattached = any(w.instance == worker.instance for w in workers.values())
                state = "has reattached" if reattached else "is gone"
                log.warning("%s %s; %d tickets reclaimed", worker.instance, state, tickets)
        self._settle()

    def _receive(self, request: KvbmRequest, send: Reply) -> None:
        self.requests += 1
        if isinstance(request, Fetch | Offer | Lend | Prepare) and request.traceparent:
            send = traced(request, send)
        now = self._clock()
        if isinstance(request, Attach):
            reply: object = self._attach(request)
        elif isinstance(request, Lend | Prepare):
            reply = self._lender.answer(request)
        else:
            reply = self._manager.answer(request, now)
        self._settle()
        if isinstance(reply, ParkedFetch):
            self._park(reply.ticket, send)
        else:
            send(reply)
        self.send_due()

    def _park(self, ticket: int, reply: Reply) -> None:
        replaced = self._parked.get(ticket)
        self._parked[ticket] = reply
        if replaced is not None:
            replaced(REPLACED)

    def _attach(self, request: Attach) -> Attached | Declined:
        if Path(request.lock).name != request.lock or not self._directory.is_held(request.lock):
            return Declined("invalid", f"{request.lock!r} is not a locked file in the directory")
        # any worker can send to any kvbm: other workers cannot guess a random number
        worker = self._manager.attach(request, secrets.randbits(ATTACHMENT_BITS))
        if isinstance(worker, Declined):
            log.warning("%s cannot attach: %s", request.instance, worker.reason)
            return worker
        self._warn_about_layout(worker)
        log.info("%s attached", worker.instance)
        return Attached(
            worker.number, self._arena.name, self._arena.size, self._key, worker.prompts.max_blocks
        )

    def _warn_about_layout(self, worker: AttachedWorker) -> None:
        """Warn once if a tier cannot hold a layout's blocks, or a model's layouts differ."""
        space, model = worker.space, worker.space.model
        if space not in self._logged_spaces:
            self._logged_spaces.add(space)
            for number, tier in self._manager.store.tiers.items():
                if not tier.fits(space.slot_bytes):
                    reason = TooSmall(space.slot_bytes, tier.slots.capacity)
                    log.warning("tier %d is not used for %s: %s", number, model, reason)
        layouts = self._manager.attachments.layouts_in_use.get(model, [])
        if len(layouts) > 1 and (model, *layouts) not in self._logged_layouts:
            self._logged_layouts.add((model, *layouts))
            text = "workers of %s differ in weights, type or layout, so not all share blocks: %s"
            log.warning(text, model, "; ".join(layouts))

    def _on_malformed(self, reason: str) -> Declined:
        self.malformed += 1
        return Declined("invalid", reason)
