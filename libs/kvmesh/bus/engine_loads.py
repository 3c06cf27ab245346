"""The loads of engines, each believed only on the subject of the instance that it speaks of.

A server's permissions bind a worker to its own subject: so none can say that another one is full.
"""

import logging
from collections.abc import Callable

import msgspec

from kvmesh.bus.client import Bus, RawMessage, Subscription
from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import Load

log = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(Load)


async def follow_loads(bus: Bus, take: Callable[[Load], object]) -> Subscription:
    """Call `take` with each load from now on, in order."""
    told = LogOnce()

    def drop(subject: str, why: str) -> None:
        if told.first(subject):
            log.warning("drop loads on %s, from now on silently: %s", subject, why)

    def receive(msg: RawMessage) -> None:
        try:
            load = _decoder.decode(msg.data)
        except msgspec.MsgspecError as error:
            drop(msg.subject, f"malformed: {error}")
            return
        if msg.subject == bus.subjects.load(load.instance):
            take(load)
        else:
            drop(msg.subject, f"it speaks of {load.instance}")

    return await bus.subscribe_raw(bus.subjects.load_all, receive)
