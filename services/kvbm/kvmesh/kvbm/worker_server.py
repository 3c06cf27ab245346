"""Where workers ask: requests go through the manager, and what came of them goes out again."""

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvmesh.bus.client import Bus, Reply, Subscription
from kvmesh.bus.kvbm import Attach, Attached, Declined, KvbmRequest, Lend, Prepare
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import Space
from kvmesh.kvbm.core.errors import TooSmall
from kvmesh.kvbm.core.manager import Manager, ParkedFetch
from kvmesh.kvbm.peers.lender import Lender
from kvmesh.kvbm.tiers.arena import Arena
from kvmesh.kvbm.tiers.node_directory import NodeDirectory

log = logging.getLogger(__name__)
ATTACHMENT_BITS = 62
ENDED = Declined("invalid", "the ticket has ended")
REPLACED = Declined("invalid", "a newer request about the ticket has taken its place")
_decoder: "msgspec.msgpack.Decoder[KvbmRequest]" = msgspec.msgpack.Decoder(KvbmRequest)


class WorkerServer:
    """Answers the workers of the node, and by `lender` the kvbms of others.

    `settle` is called after everything that may have changed what there is to do or to tell;
    `clock` gives monotonic seconds.
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
        self._seen: set[Space] = set()
        self._divided: set[tuple[str, ...]] = set()
        self._subscription: Subscription | None = None
        self.requests = 0
        self.malformed = 0

    async def open(self, subject: str) -> None:
        self._subscription = await self._bus.serve(
            subject, _decoder, self._take, on_malformed=self._on_malformed
        )

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def send_due(self) -> None:
        """Answer those who waited and need not any more."""
        answers: dict[int, object] = {**self._manager.take_answers(self._clock())}
        ended = self._parked.keys() - self._manager.fetches.readings.keys() - answers.keys()
        for ticket, answer in (answers | dict.fromkeys(ended, ENDED)).items():
            reply = self._parked.pop(ticket, None)
            if reply is not None:
                reply(answer)

    def reclaim(self) -> None:
        """Take back what workers held that are gone."""
        for guest in list(self._manager.guests.values()):
            if not self._directory.is_held(guest.lock):
                tickets = self._manager.detach(guest, self._clock())
                stays = any(g.instance == guest.instance for g in self._manager.guests.values())
                what = "has attached anew" if stays else "is gone"
                log.warning("%s %s; %d tickets reclaimed", guest.instance, what, tickets)
        self._settle()

    def _take(self, request: KvbmRequest, reply: Reply) -> None:
        self.requests += 1
        now = self._clock()
        if isinstance(request, Attach):
            answer: object = self._attach(request)
        elif isinstance(request, Lend | Prepare):
            answer = self._lender.answer(request)
        else:
            answer = self._manager.answer(request, now)
        self._settle()
        if isinstance(answer, ParkedFetch):
            self._park(answer.ticket, reply)
        else:
            reply(answer)
        self.send_due()

    def _park(self, ticket: int, reply: Reply) -> None:
        replaced = self._parked.get(ticket)
        self._parked[ticket] = reply
        if replaced is not None:
            replaced(REPLACED)

    def _attach(self, request: Attach) -> Attached | Declined:
        if Path(request.lock).name != request.lock or not self._directory.is_held(request.lock):
            return Declined("invalid", f"{request.lock!r} is no locked file in the directory")
        # any worker may speak to any kvbm: only who was told the number can name an attachment
        guest = self._manager.attach(request, secrets.randbits(ATTACHMENT_BITS))
        if isinstance(guest, Declined):
            log.warning("%s cannot attach: %s", request.instance, guest.reason)
            return guest
        self._warn(guest)
        log.info("%s attached", guest.instance)
        return Attached(
            guest.number, self._arena.name, self._arena.size, self._key, guest.prompts.most
        )

    def _warn(self, guest: AttachedWorker) -> None:
        """Say what a worker's layout means, once."""
        space, model = guest.space, guest.space.model
        if space not in self._seen:
            self._seen.add(space)
            for number, tier in self._manager.store.tiers.items():
                if not tier.fits(space.slot):
                    reason = TooSmall(space.slot, tier.slots.capacity)
                    log.warning("tier %d is not used for %s: %s", number, model, reason)
        layouts = self._manager.in_use[model]
        if len(layouts) > 1 and (model, *layouts) not in self._divided:
            self._divided.add((model, *layouts))
            text = "workers of %s differ in weights, type or layout, so not all share blocks: %s"
            log.warning(text, model, "; ".join(layouts))

    def _on_malformed(self, reason: str) -> Declined:
        self.malformed += 1
        return Declined("invalid", reason)
