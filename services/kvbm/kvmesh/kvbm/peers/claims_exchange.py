"""Exchange with the kvbms of other nodes: cards, claims, and requests to make blocks ready.

A peer that fails is not queried again for REST_S.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvmesh.blocks.digests import split_digests
from kvmesh.bus.client import Bus, Subscription
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import (
    ClaimAnnouncement,
    Declined,
    Instance,
    MessageDecoder,
    Prepare,
    Prepared,
    Role,
    incompatible_models,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.kvbm.core.blocks.block import Space
from kvmesh.kvbm.core.transfers.mesh_claims import ClaimMessage, Claims, PeerClaims, PeerSource
from kvmesh.kvbm.core.transfers.onboarding import Lookup

log = logging.getLogger(__name__)
PREPARE_S = 0.25
ANSWER_S = 0.75
PAUSE_S = 0.05
REST_S = 10.0
_decoder = MessageDecoder(ClaimAnnouncement)
_replies: MessageDecoder[Prepared | Declined] = MessageDecoder(Prepared | Declined)


class ClaimsExchange:
    """Receives claims of peers into `peer_claims` and publishes those in `claims`.

    Calls `on_card` with the card of each peer that joins or changes, and `on_leave` with that of
    each peer that leaves. `key` is the fingerprint of this node's key.
    """

    def __init__(
        self,
        bus: Bus,
        limits: StreamLimits,
        instance: str,
        key: str,
        claims: Claims,
        peer_claims: PeerClaims,
        on_card: Callable[[Instance], None],
        on_leave: Callable[[Instance], None],
    ) -> None:
        self._bus = bus
        self._instance = instance
        self.key = key
        self._claims = claims
        self._peer_claims = peer_claims
        self._on_peer_card = on_card
        self._on_peer_leave = on_leave
        self._clock = asyncio.get_running_loop().time
        self._directory = Directory(bus, limits, self._on_card, self._on_leave)
        self._failed_until: dict[str, float] = {}
        self._introduced: dict[str, frozenset[str]] = {}
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        await self._subscribe(self._bus.subjects.computing_before(self._instance))
        await self._directory.open()

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        await self._directory.close()

    # peers

    @property
    def cards(self) -> list[Instance]:
        """The cards of all other kvbms."""
        return [card for card in self._directory.instances if self._is_peer(card)]

    def compatible(self, space: Space) -> set[str]:
        """The peers to query for blocks of a layout: same key, same layout if they have workers
        of the model, and no recent failure."""
        # cards have the layouts of leads only
        ours = {space.model: [space.summary]} if space.is_lead else {}
        return {
            card.instance
            for card in self.cards
            if card.store is not None
            and card.store.key == self.key
            and not incompatible_models(ours, card.store.layouts)
            and not self.failed_recently(card.instance)
        }

    def failed_recently(self, instance: str) -> bool:
        return self._failed_until.get(instance, 0.0) > self._clock()

    def report_failure(self, instance: str, error: Exception) -> None:
        """Stop querying a peer for REST_S; its other running queries fail without a warning."""
        level = logging.DEBUG if self.failed_recently(instance) else logging.WARNING
        log.log(level, "not querying %s for %g s: %s", instance, REST_S, cause(error))
        now = self._clock()
        self._failed_until = {
            name: until for name, until in self._failed_until.items() if until > now
        }
        self._failed_until[instance] = now + REST_S
        self._peer_claims.drop_peer(instance)

    def _is_peer(self, card: Instance) -> bool:
        return card.role is Role.KVBM and card.instance != self._instance

    def _on_card(self, card: Instance) -> None:
        if self._is_peer(card):
            # Send the current claims of models that are new to a peer, as it missed them
            models = frozenset(card.store.layouts if card.store is not None else ())
            subject = self._bus.subjects.computing_before(card.instance)
            for model in models - self._introduced.get(card.instance, frozenset()):
                for message in self._claims.current(model):
                    self._post(subject, message)
            self._introduced[card.instance] = models
            self._on_peer_card(card)

    def _on_leave(self, card: Instance) -> None:
        self._failed_until.pop(card.instance, None)
        self._introduced.pop(card.instance, None)
        self._peer_claims.drop_peer(card.instance)
        self._on_peer_leave(card)

    # claims

    async def follow(self, model: str) -> None:
        """Subscribe to peers' claims of a model."""
        await self._subscribe(self._bus.subjects.computing(model))

    def publish(self, messages: Iterable[ClaimMessage]) -> None:
        for message in messages:
            self._post(self._bus.subjects.computing(message.model), message)

    def _post(self, subject: str, claim: ClaimMessage) -> None:
        digests = b"".join(claim.digests)
        message = ClaimAnnouncement(self._instance, claim.number, digests, self._claims.ttl_s)
        self._bus.post(subject, message)

    async def _subscribe(self, subject: str) -> None:
        self._subscriptions.append(await self._bus.subscribe(subject, _decoder, self._receive))

    def _receive(self, message: ClaimAnnouncement) -> None:
        peer = message.instance
        if peer == self._instance or self.failed_recently(peer):
            return
        ttl_s = min(
            self._claims.ttl_s, message.ttl_s
        )  # in this order: the message's TTL may be NaN
        until = self._clock() + ttl_s
        self._peer_claims.receive(peer, message.number, split_digests(message.digests), until)

    # preparation

    async def prepare(
        self, lookup: Lookup, peer: PeerSource, stored: bool
    ) -> tuple[list[bytes], PeerSource | None]:
        """Request blocks from a peer; return those made ready, and the peer to query for more."""
        space, digests = lookup.prompt.space, lookup.digests
        engine = lookup.engine.hoped
        message = Prepare(
            space.model,
            space.layout,
            b"".join(digests),
            engine.compute_tps,
            engine.load_bps,
            PREPARE_S,
            stored,
            lookup.prompt.traceparent,
        )
        reply = await self._request(peer.instance, message)
        if reply is None:
            return [], None
        if not reply.blocks and reply.more:
            await asyncio.sleep(PAUSE_S)
        more = reply.more or 0 < reply.blocks == len(digests) < peer.end - lookup.first
        return digests[: reply.blocks], peer if more else None

    async def _request(self, instance: str, message: Prepare) -> Prepared | None:
        subject = self._bus.subjects.kvbm(instance)
        try:
            reply = await self._bus.request(subject, message, _replies, PREPARE_S + ANSWER_S)
        except BusError as error:
            self.report_failure(instance, error)
            return None
        return reply if isinstance(reply, Prepared) else None


class NoClaimsExchange:
    """A node without peers: nothing is published or received."""

    key = ""
    cards: tuple[Instance, ...] = ()

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def follow(self, model: str) -> None:
        pass

    def publish(self, messages: Iterable[ClaimMessage]) -> None:
        pass

    async def prepare(
        self, lookup: Lookup, peer: PeerSource, stored: bool
    ) -> tuple[list[bytes], PeerSource | None]:
        return [], None
