"""Decodes messages of the active-sequence stream.

Events of kinds that this version does not know are skipped one by one; the rest are applied.
"""

import logging

import msgspec

from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import MessageDecoder, SeqBatch, SeqEvent

log = logging.getLogger(__name__)


class _UndecodedBatch(msgspec.Struct, array_like=True):
    """A SeqBatch with undecoded events."""

    source: str
    events: list[msgspec.Raw]


_batch = MessageDecoder(SeqBatch)
_undecoded = MessageDecoder(_UndecodedBatch)
_event: MessageDecoder[SeqEvent] = MessageDecoder(SeqEvent)
_logged = LogOnce()


def sequence_batch(data: bytes) -> SeqBatch:
    """A message with its readable events; raises MsgspecError if it is not a batch."""
    try:
        return _batch.decode(data)
    except msgspec.MsgspecError:
        batch = _undecoded.decode(data)
    events: list[SeqEvent] = []
    for raw in batch.events:
        try:
            events.append(_event.decode(raw))
        except msgspec.MsgspecError as error:
            _log_once(batch.source, str(error))
    return SeqBatch(batch.source, events)


def _log_once(source: str, reason: str) -> None:
    """Log a reason once: a newer process sends many events of a kind."""
    if _logged.first(reason):
        log.warning("ignored an active sequence of %s (logged once): %s", source, reason)
