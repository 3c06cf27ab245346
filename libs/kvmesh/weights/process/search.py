"""Search for sources of a copy of weights, by queries to ever more workers."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress

from kvmesh.bus.absence import REJOIN_S
from kvmesh.bus.client import Bus, RawMessage, Subscription
from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import MessageDecoder, WeightOffer, WeightQuery
from kvmesh.weights.manifest import Manifest

log = logging.getLogger(__name__)
SHARES = (1 / 64, 1 / 8, 1.0)  # of those which have chunks
WIDEN_S = 0.05
REPLY_S = 2.0  # to wait for a busy worker, before its weights are read elsewhere
OFFERED_S = REJOIN_S + 0.5
_offers = MessageDecoder(WeightOffer)


async def offered(bus: Bus, digest: str) -> bool:
    """True if a worker replies, within OFFERED_S seconds, that it has chunks of a copy.

    If no process listens, the question is repeated: all that have chunks may be changing servers.
    """
    loop, absence, logged = asyncio.get_running_loop(), bus.absence(), LogOnce()
    replied, found = asyncio.Event(), False

    def receive(message: RawMessage) -> None:
        nonlocal found
        found = found or _offer(message, logged) is not None
        if found or not message.data:  # without data the server says that nobody listens
            replied.set()

    inbox = bus.new_inbox()
    subscription = await bus.subscribe_raw(inbox, receive)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(OFFERED_S):
                while not (found or absence.refused(loop.time(), bus.connected_at)):
                    replied.clear()
                    message = WeightQuery(digest, secrets.token_hex(8), 1.0, 0.0, "")
                    bus.post(bus.subjects.weights(digest), message, reply=inbox)
                    await replied.wait()
                    await asyncio.sleep(0 if found else absence.wait_s(loop.time()))
    finally:
        await subscription.unsubscribe()
    return found


def _offer(message: RawMessage, logged: LogOnce) -> WeightOffer | None:
    """The offer in a reply; None if it is malformed, or says that nobody listens."""
    if not message.data:
        return None
    try:
        return _offers.decode(message.data)
    except ValueError as error:
        if logged.first(str(error)):
            log.warning("dropped a malformed offer of weights: %s", error)
        return None


class SourceSearch:
    """Passes the offers for one copy to `found`; offers that do not fit it are dropped."""

    def __init__(
        self, bus: Bus, manifest: Manifest, instance: str, found: Callable[[WeightOffer], None]
    ) -> None:
        self._bus = bus
        self._manifest = manifest
        self._instance = instance
        self._found = found
        self._inbox = bus.new_inbox()
        self._subscription: Subscription | None = None
        self._replied = asyncio.Event()
        self._nobody = False  # listens, says the server
        self._logged = LogOnce()

    async def open(self) -> None:
        self._subscription = await self._bus.subscribe_raw(self._inbox, self._receive)

    async def ask(self, enough: Callable[[], bool], patience_s: float = WIDEN_S) -> None:
        """Ask a few workers, then more of them, until `enough`.

        All have been asked after 0.1 s, and have `patience_s` seconds to reply.
        """
        digest, query, above = self._manifest.digest, secrets.token_hex(8), 0.0
        self._nobody = False
        for share in SHARES:
            message = WeightQuery(digest, query, share, above, self._instance)
            self._bus.post(self._bus.subjects.weights(digest), message, reply=self._inbox)
            with suppress(TimeoutError):
                async with asyncio.timeout(WIDEN_S if share < 1 else patience_s):
                    await self._until(enough)
            if enough() or self._nobody:
                return
            above = share

    async def _until(self, enough: Callable[[], bool]) -> None:
        while not (enough() or self._nobody):
            self._replied.clear()
            await self._replied.wait()

    async def close(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()

    def _receive(self, message: RawMessage) -> None:
        self._nobody = not message.data
        self._replied.set()
        offer = _offer(message, self._logged)
        if offer is None:
            return
        if offer.digest != self._manifest.digest or offer.instance == self._instance:
            return
        if len(offer.files) == len(self._manifest.files):
            self._found(offer)
