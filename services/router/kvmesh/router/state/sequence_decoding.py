"""From a message of the active-sequence stream to its events, those that are known here.

A newer version's kinds of event are left out, one by one: what surrounds them still counts.
"""

import logging

import msgspec

from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import SeqBatch, SeqEvent

log = logging.getLogger(__name__)


class _Loose(msgspec.Struct, array_like=True):
    """A SeqBatch whose events are still to be read."""

    source: str
    events: list[msgspec.Raw]


_batch = msgspec.msgpack.Decoder(SeqBatch)
_loose = msgspec.msgpack.Decoder(_Loose)
_event: "msgspec.msgpack.Decoder[SeqEvent]" = msgspec.msgpack.Decoder(SeqEvent)
_told = LogOnce()


def sequence_events(data: bytes) -> list[SeqEvent]:
    """The readable events of a message; raises MsgspecError if it is no batch at all."""
    try:
        return _batch.decode(data).events
    except msgspec.MsgspecError:
        batch = _loose.decode(data)
    events = []
    for each in batch.events:
        try:
            events.append(_event.decode(each))
        except msgspec.MsgspecError as error:
            _tell(batch.source, str(error))
    return events


def _tell(source: str, reason: str) -> None:
    """Say it once: a newer process will send many of a kind."""
    if _told.first(reason):
        log.warning("ignored an active sequence of %s, and will others like it: %s", source, reason)
