"""What a frontend says to workers about a sequence: take it, stop it, you are gone."""

import asyncio
import logging
from math import inf
from typing import NamedTuple

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery import Directory, forget_instance
from kvmesh.bus.errors import BusError, NoResponder, RequestTimeout
from kvmesh.bus.messages import Cancel, Work, WorkReply
from kvmesh.bus.ping import ping
from kvmesh.frontend.dispatch.prompt_delta import SentPromptCache
from kvmesh.frontend.dispatch.token_inbox import TokenInbox
from kvmesh.frontend.dispatch.token_stream import TokenStream

log = logging.getLogger(__name__)
ANSWER_S = 1.0  # workers answer at once, whatever their engines do
PROBE_S = 0.5
REJOIN_S = 2.0  # after the own connection was made, in which others' may still be on their way
CHECK_S = 30.0
_replies = msgspec.msgpack.Decoder(WorkReply)


class OfferResult(NamedTuple):
    """The result of an offer: the `WorkReply.status`, or why there was no answer.

    "gone": nobody listens there; "silent"; "frozen": it was silent before; "away": the connection
    of this process broke meanwhile, or just before, which explains it.
    """

    status: str
    reason: str = ""


class WorkClient:
    """Hands sequences to workers; the tokens of those that are taken go to the inbox.

    A worker that has not answered is `silent` until it answers a probe: nothing is offered to it.
    """

    def __init__(self, bus: Bus, inbox: TokenInbox, directory: Directory) -> None:
        self._bus = bus
        self._inbox = inbox
        self._directory = directory
        self._bases = SentPromptCache()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self.buried_at = -inf  # when a worker was last found gone, on the loop's clock
        self._loop = asyncio.get_running_loop()

    @property
    def silent(self) -> list[str]:
        """Workers that have not answered, and not a probe since."""
        return list(self._probes)

    async def make(
        self, sequence: TokenStream, instance: str, work: Work, careful: bool = False
    ) -> OfferResult:
        """Offer `work`, the current attempt of `sequence`. Unless taken, nothing is left of it.

        If `careful`, to a worker that has just answered: what it does not answer silences it.
        """
        if careful and not await self._answers(instance):
            self.suspect(instance)
            return OfferResult("frozen", "it does not answer")
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
                return OfferResult("accepted")  # only the answer was lost: its tokens come
            return await self._unanswered(sequence, error, offered_at)
        if reply.kept:
            self._bases.keep(instance, work)
        if reply.status != "accepted":
            self._inbox.remove(sequence)
        elif reply.checking:
            await self._begun(sequence)
        return OfferResult(reply.status, reply.reason)

    async def _begun(self, sequence: TokenStream) -> None:
        """Wait for the first news; raises what the engine refused it with.

        If none comes the sequence is watched like any other that falls silent.
        """
        try:
            async with asyncio.timeout(CHECK_S):
                await sequence.begun.wait()
        except TimeoutError:
            return
        if sequence.error is not None and not sequence.fresh:
            self._inbox.remove(sequence)
            raise sequence.error

    async def _offer(self, instance: str, work: Work) -> WorkReply:
        subject = self._bus.subjects.work(instance)
        return await self._bus.request(subject, work, _replies, ANSWER_S)

    async def _unanswered(
        self, sequence: TokenStream, error: NoResponder | RequestTimeout, offered_at: float
    ) -> OfferResult:
        self._inbox.remove(sequence)
        absent = isinstance(error, NoResponder)
        if absent and self._bus.connected_for >= REJOIN_S:
            await self.bury(sequence.instance)
            return OfferResult("gone", str(error))
        self.cancel(sequence)
        self.suspect(sequence.instance)
        cut_off = self._bus.connected_for < self._loop.time() - offered_at
        return OfferResult("away" if absent or cut_off else "silent", str(error))

    def suspect(self, instance: str) -> None:
        """It has not answered: it gets no more work until it does."""
        if instance not in self._probes and self._is_listed(instance):
            log.warning("worker %s does not answer: it is offered nothing until it does", instance)
            probe = self._loop.create_task(self._probe(instance), name="probe")
            self._probes[instance] = probe

    async def _probe(self, instance: str) -> None:
        try:
            while self._is_listed(instance):
                if await self._answers(instance):
                    log.info("worker %s answers again", instance)
                    return
                await asyncio.sleep(PROBE_S)
        finally:
            del self._probes[instance]

    def _is_listed(self, instance: str) -> bool:
        return any(card.instance == instance for card in self._directory.instances)

    async def _answers(self, instance: str) -> bool:
        try:
            await ping(self._bus, instance, ANSWER_S)
        except BusError:
            return False
        return True

    def cancel(self, sequence: TokenStream) -> None:
        """Tell the worker that nobody wants more of this attempt."""
        subject = self._bus.subjects.ctl(sequence.instance)
        self._bus.post(subject, Cancel(sequence.attempt))

    async def bury(self, instance: str) -> None:
        """Remove the lease of a process that no longer listens, so that everyone knows now.

        Not right after this process has connected: the server may have been away for all.
        """
        if self._bus.connected_for < REJOIN_S:
            return
        self.buried_at = self._loop.time()
        for card in self._directory.instances:
            if card.instance == instance:
                log.warning("worker %s is gone: nobody listens on its subjects", instance)
                await forget_instance(self._bus, card)
