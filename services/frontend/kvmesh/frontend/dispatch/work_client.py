"""Client of the workers: offers and cancels work, probes silent workers, expires dead leases."""

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.direct_client import REPEAT_S
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.leases import delete_lease
from kvmesh.bus.discovery.ping import ping
from kvmesh.bus.errors import BusError, NoResponder, RequestTimeout
from kvmesh.bus.messages import Cancel, MessageDecoder, Work, WorkReply
from kvmesh.frontend.dispatch.images.client import ImageClient
from kvmesh.frontend.dispatch.token_inbox import Consumer, TokenInbox
from kvmesh.frontend.dispatch.token_stream import TokenStream, told
from kvmesh.prompt_delta.tokens import SentPromptCache
from kvmesh.tracing.names import OFFER

log = logging.getLogger(__name__)
REPLY_TIMEOUT_S = 1.0  # workers reply at once, whatever their engines do
PROBE_S = 0.5
CHECK_TIMEOUT_S = 30.0
_replies = MessageDecoder(WorkReply)


class OfferResult(NamedTuple):
    """The `WorkReply.status` of an offer, or the reason why there was no reply.

    "absent": no process listens there now; "silent": no reply in time; "frozen": the worker was
    silent before; "away": this process's own connection broke during the offer.
    """

    status: str
    reason: str = ""


class WorkClient:
    """Offers sequences to workers and registers accepted ones with the inbox.

    A worker that missed a reply is `silent` until it replies to a probe. `gone` gets each instance
    that does not come back, and `back` each that does.
    """

    def __init__(
        self,
        bus: Bus,
        inbox: TokenInbox,
        directory: Directory,
        images: ImageClient | None = None,
    ) -> None:
        self._images = images
        self._bus = bus
        self.inbox = inbox
        self._directory = directory
        self._sent_prompts = SentPromptCache()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self.lost_at = -inf  # loop time at which a worker was last found gone
        self.gone: Callable[[str], None] = lambda _: None
        self.back: Callable[[str], None] = lambda _: None
        self._loop = asyncio.get_running_loop()

    @property
    def silent(self) -> list[str]:
        """Instances that missed a reply and have not replied to a probe since."""
        return list(self._probes)

    async def offer(
        self,
        stream: TokenStream,
        consumer: Consumer,
        instance: str,
        work: Work,
        probe_first: bool = False,
    ) -> OfferResult:
        """Offer `work`, the current attempt of `stream`, and receive its tokens if accepted.

        `probe_first` pings the worker before the offer, to distinguish a worker that was frozen
        already from one that this work freezes. Raises the error of an engine that refuses it.
        """
        if probe_first and not await self._replies(instance):
            self.suspect(instance)
            return OfferResult("frozen", "it does not reply")
        offered_at = self._loop.time()
        stream.dispatched(instance, offered_at)
        self.inbox.add(stream, consumer)
        offering = stream.span.child(OFFER, kind="client")
        try:
            reply = await self._send(instance, self._sent_prompts.shorten(instance, work))
            if reply.status == "incomplete":
                self._sent_prompts.forget(instance, work)
                reply = await self._send(instance, work)
            if reply.status == "images" and self._images is not None:
                if reason := await self._images.send(instance, reply.missing):
                    reply = WorkReply(status="images", reason=reason)
                else:
                    reply = await self._send(instance, work)
        except (NoResponder, RequestTimeout) as error:
            if stream.received_at > offered_at:
                return OfferResult("accepted")  # only the reply was lost: tokens arrive
            return self._unanswered(stream, error, offered_at)
        finally:
            offering.end()
        if reply.stored:
            self._sent_prompts.store(instance, work)
        if reply.status != "accepted":
            self.inbox.remove(stream)
            if self._loop.time() - offered_at > REPEAT_S:
                self.cancel(stream)  # the worker may accept the offer that was repeated
        elif reply.checking:
            await self._checked(stream)
        return OfferResult(reply.status, told(reply.reason))

    async def _checked(self, stream: TokenStream) -> None:
        """Wait for the engine's first message; raise its error if it refuses the work.

        Without a message in time the monitor handles the stream like any silent one.
        """
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await stream.started.wait()
        except TimeoutError:
            return
        if stream.error is not None and not stream.fresh:
            self.inbox.remove(stream)
            raise stream.error

    async def _send(self, instance: str, work: Work) -> WorkReply:
        subject = self._bus.subjects.work(instance)
        return await self._bus.request(
            subject, work, _replies, REPLY_TIMEOUT_S, at_once=True, repeats=True
        )

    def _unanswered(
        self, stream: TokenStream, error: NoResponder | RequestTimeout, offered_at: float
    ) -> OfferResult:
        self.inbox.remove(stream)
        self.suspect(stream.instance)
        if isinstance(error, NoResponder):
            return OfferResult("absent", str(error))
        self.cancel(stream)
        cut_off = self._bus.connected_for < self._loop.time() - offered_at
        return OfferResult("away" if cut_off else "silent", str(error))

    def suspect(self, instance: str) -> None:
        """The worker missed a reply or does not listen: list it as silent, and probe it until it
        replies, is gone, or its lease has ended."""
        if instance not in self._probes and self._is_listed(instance):
            probe = self._loop.create_task(self._probe(instance), name="probe")
            self._probes[instance] = probe

    async def _probe(self, instance: str) -> None:
        absence, logged = self._bus.absence(), False
        try:
            while self._is_listed(instance):
                wait_s = PROBE_S
                try:
                    await ping(self._bus, instance, REPLY_TIMEOUT_S, at_once=True)
                except NoResponder:
                    if absence.refused(self._loop.time(), self._bus.connected_at):
                        await self._bury(instance)
                        return
                    wait_s = absence.wait_s(self._loop.time())
                except BusError:
                    absence.replied()
                    if not logged:
                        log.warning(
                            "worker %s does not reply: offering it no work until it does", instance
                        )
                    logged = True
                else:
                    if logged:
                        log.info("worker %s replies again", instance)
                    self.back(instance)
                    return
                await asyncio.sleep(wait_s)
        finally:
            del self._probes[instance]

    async def _bury(self, instance: str) -> None:
        """Remove the lease of a process that no longer listens, so that all processes see it go."""
        self.lost_at = self._loop.time()
        log.warning("worker %s is gone: no process listens on its subjects", instance)
        self.gone(instance)
        try:
            for card in self._directory.instances:
                if card.instance == instance:
                    await delete_lease(self._bus, card)
        except BusError as error:
            log.warning("cannot delete the lease of %s, which will expire: %s", instance, error)

    def _is_listed(self, instance: str) -> bool:
        return any(card.instance == instance for card in self._directory.instances)

    async def _replies(self, instance: str) -> bool:
        try:
            await ping(self._bus, instance, REPLY_TIMEOUT_S)
        except BusError:
            return False
        return True

    def cancel(self, stream: TokenStream) -> None:
        """Post a command to stop the current attempt."""
        subject = self._bus.subjects.ctl(stream.instance)
        self._bus.post(subject, Cancel(stream.work))
