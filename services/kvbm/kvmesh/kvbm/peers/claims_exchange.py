"""The kvbms of other nodes: who is there, what they compute, and what they make ready for this one.

One that fails is left alone for a while.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from kvmesh.blocks.digests import split_digests
from kvmesh.blocks.layout import divided
from kvmesh.bus.client import Bus, Subscription
from kvmesh.bus.discovery import Directory
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.kvbm import Computing, Declined, Prepare, Prepared
from kvmesh.bus.messages import Instance, Role
from kvmesh.bus.streams import StreamLimits
from kvmesh.kvbm.core.blocks.block import Space
from kvmesh.kvbm.core.transfers.mesh_claims import ClaimMessage, Claims, PeerClaims, PeerSource
from kvmesh.kvbm.core.transfers.onboarding import Lookup

log = logging.getLogger(__name__)
PREPARE_S = 0.25
ANSWER_S = 0.75
PAUSE_S = 0.05
REST_S = 10.0
_decoder = msgspec.msgpack.Decoder(Computing)
_replies: "msgspec.msgpack.Decoder[Prepared | Declined]" = msgspec.msgpack.Decoder(
    Prepared | Declined
)


class ClaimsExchange:
    """Hears their claims into `others`, and tells what is in `claims`.

    `came` gets the cards of those that join or change, `left` of those that leave. `key` is the
    fingerprint of this node's key.
    """

    def __init__(
        self,
        bus: Bus,
        limits: StreamLimits,
        instance: str,
        key: str,
        claims: Claims,
        others: PeerClaims,
        came: Callable[[Instance], None],
        left: Callable[[Instance], None],
    ) -> None:
        self._bus = bus
        self._instance = instance
        self._key = key
        self._claims = claims
        self._others = others
        self._came = came
        self._left = left
        self._clock = asyncio.get_running_loop().time
        self._directory = Directory(bus, limits, self._on_card, self._on_leave)
        self._resting: dict[str, float] = {}
        self._told: dict[str, frozenset[str]] = {}
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        await self._listen(self._bus.subjects.computing_before(self._instance))
        await self._directory.open()

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        await self._directory.close()

    @property
    def cards(self) -> list[Instance]:
        return [card for card in self._directory.instances if self._is_other(card)]

    def sharing(self, space: Space) -> set[str]:
        """Those that may be asked for blocks of a layout, and have not failed lately.

        They name them alike, and if they have workers of the model, some have the same layout.
        """
        ours = {space.model: [space.words]}
        return {
            card.instance
            for card in self.cards
            if card.store is not None
            and card.store.key == self._key
            and not divided(ours, card.store.layouts)
            and not self.rests(card.instance)
        }

    def rests(self, instance: str) -> bool:
        """Whether it has failed lately."""
        return self._resting.get(instance, 0.0) > self._clock()

    def rest(self, instance: str, error: Exception) -> None:
        """It has failed: leave it alone. What else was asked of it then fails as well, untold."""
        level = logging.DEBUG if self.rests(instance) else logging.WARNING
        log.log(level, "leaving %s alone for %g s: %s", instance, REST_S, cause(error))
        now = self._clock()
        self._resting = {name: until for name, until in self._resting.items() if until > now}
        self._resting[instance] = now + REST_S
        self._others.leave(instance)

    # what is computed

    async def follow(self, model: str) -> None:
        """Hear from now on what they compute of a model."""
        await self._listen(self._bus.subjects.computing(model))

    def tell(self, tellings: Iterable[ClaimMessage]) -> None:
        for telling in tellings:
            self._post(self._bus.subjects.computing(telling.model), telling)

    def _tell_newcomer(self, card: Instance) -> None:
        """Whose workers' models are new to it has not heard what is computed of them now."""
        models = frozenset(card.store.layouts if card.store is not None else ())
        subject = self._bus.subjects.computing_before(card.instance)
        for model in models - self._told.get(card.instance, frozenset()):
            for telling in self._claims.under_way(model):
                self._post(subject, telling)
        self._told[card.instance] = models

    def _post(self, subject: str, telling: ClaimMessage) -> None:
        marks = b"".join(telling.marks)
        message = Computing(self._instance, telling.number, marks, self._claims.lasts_s)
        self._bus.post(subject, message)

    async def _listen(self, subject: str) -> None:
        self._subscriptions.append(await self._bus.subscribe(subject, _decoder, self._hear))

    def _hear(self, message: Computing) -> None:
        owner = message.instance
        if owner == self._instance or self.rests(owner):
            return
        lasts_s = min(self._claims.lasts_s, message.lasts_s)  # in this order: it may be NaN
        until = self._clock() + lasts_s
        self._others.hear(owner, message.number, split_digests(message.digests), until)

    # what they make ready

    async def prepare(
        self, lookup: Lookup, further: PeerSource, stored: bool
    ) -> tuple[list[bytes], PeerSource | None]:
        """Which blocks of a lookup may be read now, and who is to be asked for more."""
        space, digests = lookup.prompt.space, lookup.digests
        engine = lookup.engine
        message = Prepare(
            space.model,
            space.layout,
            b"".join(digests),
            engine.compute_tps,
            engine.load_bps,
            PREPARE_S,
            stored,
        )
        reply = await self._ask(further.owner, message)
        if reply is None:
            return [], None
        if not reply.blocks and reply.more:
            await asyncio.sleep(PAUSE_S)
        more = reply.more or 0 < reply.blocks == len(digests) < further.end - lookup.first
        return digests[: reply.blocks], further if more else None

    async def _ask(self, owner: str, message: Prepare) -> Prepared | None:
        subject = self._bus.subjects.kvbm(owner)
        try:
            reply = await self._bus.request(subject, message, _replies, PREPARE_S + ANSWER_S)
        except BusError as error:
            self.rest(owner, error)
            return None
        return reply if isinstance(reply, Prepared) else None

    # who is there

    def _is_other(self, card: Instance) -> bool:
        return card.role is Role.KVBM and card.instance != self._instance

    def _on_card(self, card: Instance) -> None:
        if self._is_other(card):
            self._tell_newcomer(card)
            self._came(card)

    def _on_leave(self, card: Instance) -> None:
        self._resting.pop(card.instance, None)
        self._told.pop(card.instance, None)
        self._others.leave(card.instance)
        self._left(card)
