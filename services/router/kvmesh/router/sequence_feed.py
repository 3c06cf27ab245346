"""Events of active sequences: from their stream, and directly while that has no leader.

After the loss of a server, a cluster needs seconds to elect a leader for a stream. Meanwhile
nothing that processes publish is stored or delivered, and a router that hears of no end takes every
rank for a busy one. It notices that its own events do not come back, and subscribes to the subjects
until they do.
"""

import logging
from collections.abc import Callable
from math import inf
from time import monotonic

import msgspec

from kvmesh.bus.client import Bus, RawMessage, Subscription
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import SeqBatch, SeqEvent, SeqFree
from kvmesh.bus.packs import EMPTY
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.bus.subjects import untoken
from kvmesh.router.state.sequence_decoding import sequence_batch
from kvmesh.runtime.lru import LruCache

log = logging.getLogger(__name__)
ECHO_S = 0.3  # for an own event to come back; a stream with a leader takes milliseconds
CALM_S = 1.0  # of own events that come back, after which the stream has a leader
MAX_ENDED = 65_536
Apply = Callable[[str, SeqBatch], None]


class SequenceFeed:
    """Passes each batch to `apply` with its model; during a change of source perhaps twice.

    An event of a request that has ended directly is dropped when the stream delivers it later.
    `check` runs several times a second. Times are those of `monotonic`.
    """

    def __init__(self, bus: Bus, own: str, apply: Apply) -> None:
        self._bus = bus
        self._own = own
        self._apply = apply
        self._unheard_since = inf  # the first own event since the last that came back
        self._heard_at = -inf  # anything from the stream
        self._direct: Subscription | None = None
        self._direct_since = 0.0
        self._ended: LruCache[str, bool] = LruCache(MAX_ENDED)
        subjects = bus.subjects
        self.reader = StreamReader(
            bus, subjects.seq_stream, subjects.seq_all, self._on_stream, Start()
        )

    def post(self, subject: str, events: list[SeqEvent]) -> None:
        """Publish events of this router."""
        self._bus.post(subject, SeqBatch(self._own, events))
        self._unheard_since = min(self._unheard_since, monotonic())

    async def check(self, now: float) -> None:
        """Subscribe to the subjects, or end that, as the stream is."""
        silent = now - max(self._unheard_since, self._heard_at) > ECHO_S
        try:
            if self._direct is None and silent and self._bus.connected:
                log.info("the stream of active sequences has no leader: reading them directly")
                self._direct_since = now
                self._direct = await self._bus.subscribe_raw(
                    self._bus.subjects.seq_all, self._on_message
                )
            elif self._direct is not None and silent:
                self._direct_since = now
            elif self._direct is not None and now - self._direct_since > CALM_S:
                await self.stop()
        except BusError as error:
            log.warning("cannot read active sequences directly: %s", error)

    async def stop(self) -> None:
        """Read the stream only."""
        direct, self._direct = self._direct, None
        self._ended = LruCache(MAX_ENDED)
        if direct is not None:
            await direct.unsubscribe()

    def _on_stream(self, message: StreamMessage) -> None:
        batch = _decoded(message.subject, message.data)
        if batch is None:
            return
        self._heard_at = monotonic()
        if batch.source == self._own:
            self._unheard_since = inf
        if self._direct is not None:
            late = [event for event in batch.events if event.request in self._ended]
            if late:
                batch = SeqBatch(batch.source, [e for e in batch.events if e not in late])
        self._apply(model_of(message.subject), batch)

    def _on_message(self, message: RawMessage) -> None:
        batch = _decoded(message.subject, message.data)
        if batch is None:
            return
        for event in batch.events:
            if type(event) is SeqFree:
                self._ended.put(event.request, True)
        self._apply(model_of(message.subject), batch)


def _decoded(subject: str, data: bytes) -> SeqBatch | None:
    if data == EMPTY:  # by which `kvmesh doctor` probes the subject; no stream stores it
        return None
    try:
        return sequence_batch(data)
    except msgspec.MsgspecError as error:
        log.warning("ignored malformed active sequences on %s: %s", subject, error)
        return None


def model_of(subject: str) -> str:
    """The model of a subject of active sequences or of decisions."""
    return untoken(subject.rpartition(".")[2])
