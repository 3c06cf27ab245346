"""Loads and starts of workers, accepted only on the subject of the instance that they describe.

The server's permissions bind a worker to its own subjects, so no worker can report another as full.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvmesh.bus.client import Bus, RawMessage, Subscription
from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import Load, MessageDecoder, Starting

log = logging.getLogger(__name__)
_loads = MessageDecoder(Load)
_starts = MessageDecoder(Starting)
Report = TypeVar("Report", Load, Starting)


async def follow_loads(bus: Bus, handler: Callable[[Load], object]) -> Subscription:
    """Call `handler` with each load from now on, in order."""
    subjects = bus.subjects
    return await _follow(bus, subjects.load_all, subjects.load, _loads, handler)


async def follow_starts(bus: Bus, handler: Callable[[Starting], object]) -> Subscription:
    """Call `handler` with each phase of a worker that starts, from now on."""
    subjects = bus.subjects
    return await _follow(bus, subjects.starting_all, subjects.starting, _starts, handler)


async def _follow(
    bus: Bus,
    pattern: str,
    subject_of: Callable[[str], str],
    decoder: MessageDecoder[Report],
    handler: Callable[[Report], object],
) -> Subscription:
    log_once = LogOnce()

    def drop(subject: str, reason: str) -> None:
        if log_once.first(subject):
            log.warning("dropping messages on %s, logged once: %s", subject, reason)

    def receive(msg: RawMessage) -> None:
        try:
            report = decoder.decode(msg.data)
        except msgspec.MsgspecError as error:
            drop(msg.subject, f"malformed: {error}")
            return
        if msg.subject == subject_of(report.instance):
            handler(report)
        else:
            drop(msg.subject, f"it describes {report.instance}")

    return await bus.subscribe_raw(pattern, receive)
