"""Decodes and validates messages of the KV stream.

An unreadable batch is rejected. A single unreadable event is replaced by `Bad`, so that its id
still counts and the events around it are applied.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from kvmesh.bus.messages import KvBatch, KvEvent, MessageDecoder, Removed, Stored
from kvmesh.bus.subjects import name_of, untoken
from kvmesh.hashing import HASH_BYTES
from kvmesh.index.interface import TIERS

MAX_RANKS = 4096
MAX_NAME = 512
MAX_EVENT_ID = 1 << 62


class MalformedBatch(Exception):
    """A message that is not a KvBatch of its subject's worker."""


class Bad:
    """Placeholder of an unreadable event. `unknown_tag`: its kind is unknown to this version."""

    __slots__ = ("reason", "unknown_tag")

    def __init__(self, reason: str, unknown_tag: bool) -> None:
        self.reason = reason
        self.unknown_tag = unknown_tag


class EventSource(NamedTuple):
    """The publisher of one subject of the KV stream."""

    model: str
    worker: str


class Events(NamedTuple):
    """A validated batch: `first` is the id of the first of `events`."""

    source: EventSource
    instance: str
    rank: int
    first: int
    time: float
    events: Sequence[KvEvent | Bad]


class _Envelope(NamedTuple):
    worker: str
    instance: str
    rank: int
    first: int
    time: float


_batch: Final = MessageDecoder(KvBatch)
_undecoded: Final = MessageDecoder(tuple[str, str, int, int, float, list[msgspec.Raw]])
_event: Final = MessageDecoder(KvEvent)
_tagged: Final = MessageDecoder(list[object])
_TAGS: Final = ("stored", "removed", "cleared")


def source_of(subject: str) -> EventSource:
    """The source that a subject `kvm.<ns>.kv.<model>.<worker>` names."""
    model, worker = subject.split(".")[-2:]
    return EventSource(untoken(model), untoken(worker))


def decode(source: EventSource, data: bytes) -> Events:
    """Decode one message; raises MalformedBatch if its envelope is unusable."""
    try:
        batch = _batch.decode(data)
        events: Sequence[KvEvent | Bad] = batch.events
        if any(_fault(event) for event in batch.events):
            events = [_checked(event) for event in batch.events]
        envelope = _Envelope(batch.worker, batch.instance, batch.rank, batch.first, batch.time)
    except msgspec.MsgspecError:
        envelope, events = _decode_each(data)
    _check_envelope(source, envelope)
    return Events(source, envelope.instance, envelope.rank, envelope.first, envelope.time, events)


def _decode_each(data: bytes) -> tuple[_Envelope, list[KvEvent | Bad]]:
    try:
        worker, instance, rank, first, stamp, raw = _undecoded.decode(data)
    except msgspec.MsgspecError as error:
        raise MalformedBatch(str(error)) from None
    return _Envelope(worker, instance, rank, first, stamp), [_decode_event(event) for event in raw]


def _decode_event(raw: msgspec.Raw) -> KvEvent | Bad:
    try:
        return _checked(_event.decode(raw))
    except msgspec.MsgspecError as error:
        return Bad(str(error), _has_unknown_tag(raw))


def _has_unknown_tag(raw: msgspec.Raw) -> bool:
    try:
        fields = _tagged.decode(raw)
    except msgspec.MsgspecError:
        return False
    return bool(fields) and isinstance(fields[0], str) and fields[0] not in _TAGS


def _checked(event: KvEvent) -> KvEvent | Bad:
    fault = _fault(event)
    return Bad(fault, unknown_tag=False) if fault else event


def _fault(event: KvEvent) -> str:
    if event.tier is not None and not 0 <= event.tier < TIERS:
        return f"tier {event.tier}"
    if isinstance(event, Stored):
        if len(event.engine) % HASH_BYTES or len(event.engine) != len(event.local):
            return f"{len(event.engine)} bytes of engine and {len(event.local)} of local hashes"
    elif isinstance(event, Removed):
        if len(event.engine) % HASH_BYTES:
            return f"{len(event.engine)} bytes of engine hashes"
        if len(event.reason or "") > MAX_NAME or len(event.request or "") > MAX_NAME:
            return f"a reason or request of more than {MAX_NAME} characters"
    return ""


def _check_envelope(source: EventSource, envelope: _Envelope) -> None:
    if envelope.worker != source.worker:
        raise MalformedBatch(
            f"a batch of {envelope.worker[:64]!r} on the subject of {source.worker!r}"
        )
    if not 0 < len(envelope.instance) <= MAX_NAME:
        raise MalformedBatch(f"an instance id of {len(envelope.instance)} characters")
    if name_of(envelope.instance) != source.worker:
        raise MalformedBatch(
            f"events of {envelope.instance[:64]!r} on the subject of {source.worker!r}"
        )
    if not 0 <= envelope.rank < MAX_RANKS:
        raise MalformedBatch(f"rank {envelope.rank}")
    if not 0 <= envelope.first < MAX_EVENT_ID:
        raise MalformedBatch(f"event id {envelope.first}")
