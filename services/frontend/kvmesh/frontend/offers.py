"""What a frontend says to workers about a sequence: take it, stop it, you are gone."""

import asyncio
import logging
from typing import NamedTuple

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery import Directory, forget_instance
from kvmesh.bus.errors import NoResponder, RequestTimeout
from kvmesh.bus.messages import Cancel, Work, WorkReply
from kvmesh.frontend.bases import Bases
from kvmesh.frontend.inbox import Inbox
from kvmesh.frontend.sequence import Sequence

log = logging.getLogger(__name__)
OFFER_TIMEOUT_S = 3.0
REJOIN_S = 2.0  # after the own connection was made, in which others' may still be on their way


class Offered(NamedTuple):
    """What came of an offer: the `WorkReply.status`, or "gone" or "silent" without an answer."""

    status: str
    reason: str = ""


class Offers:
    """Hands sequences to workers; the tokens of those that are taken go to the inbox."""

    def __init__(self, bus: Bus, inbox: Inbox, directory: Directory) -> None:
        self._bus = bus
        self._inbox = inbox
        self._directory = directory
        self._bases = Bases()
        self._loop = asyncio.get_running_loop()

    async def make(self, sequence: Sequence, instance: str, work: Work) -> Offered:
        """Offer `work`, the current attempt of `sequence`. Unless taken, nothing is left of it."""
        offered_at = self._loop.time()
        sequence.place(instance, offered_at)
        self._inbox.add(sequence)
        try:
            reply = await self._offer(instance, self._bases.shorten(instance, work))
            if reply.status == "incomplete":
                self._bases.forget(instance, work)
                reply = await self._offer(instance, work)
        except (NoResponder, RequestTimeout) as error:
            if sequence.heard_at > offered_at:
                return Offered("accepted")  # only the answer was lost: its tokens come
            return await self._unanswered(sequence, error)
        if reply.kept:
            self._bases.keep(instance, work)
        if reply.status != "accepted":
            self._inbox.remove(sequence)
        return Offered(reply.status, reply.reason)

    async def _offer(self, instance: str, work: Work) -> WorkReply:
        subject = self._bus.subjects.work(instance)
        return await self._bus.request(subject, work, WorkReply, OFFER_TIMEOUT_S)

    async def _unanswered(self, sequence: Sequence, error: NoResponder | RequestTimeout) -> Offered:
        self._inbox.remove(sequence)
        if isinstance(error, NoResponder):
            await self.bury(sequence.instance)
            return Offered("gone", str(error))
        await self.cancel(sequence)
        return Offered("silent", str(error))

    async def cancel(self, sequence: Sequence) -> None:
        """Tell the worker that nobody wants more of this attempt."""
        subject = self._bus.subjects.ctl(sequence.instance)
        await self._bus.publish(subject, Cancel(sequence.attempt))

    async def bury(self, instance: str) -> None:
        """Remove the lease of a process that no longer listens, so that everyone knows now.

        Not right after this process has connected: the server may have been away for all.
        """
        if self._bus.connected_for < REJOIN_S:
            return
        for card in self._directory.instances:
            if card.instance == instance:
                log.warning("worker %s is gone: nobody listens on its subjects", instance)
                await forget_instance(self._bus, card)
