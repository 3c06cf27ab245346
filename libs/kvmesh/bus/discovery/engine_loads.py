"""Load reports of engines, accepted only on the subject of the instance that they describe.

The server's permissions bind a worker to its own subject, so no worker can report another as full.
"""

import logging
from collections.abc import Callable

import msgspec

from kvmesh.bus.client import Bus, RawMessage, Subscription
from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import Load

log = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(Load)


async def follow_loads(bus: Bus, handler: Callable[[Load], object]) -> Subscription:
    """Call `handler` with each load from now on, in order."""
    log_once = LogOnce()

    def drop(subject: str, reason: str) -> None:
        if log_once.first(subject):
            log.warning("dropping loads on %s, logged once: %s", subject, reason)

    def receive(msg: RawMessage) -> None:
        try:
            load = _decoder.decode(msg.data)
        except msgspec.MsgspecError as error:
            drop(msg.subject, f"malformed: {error}")
            return
        if msg.subject == bus.subjects.load(load.instance):
            handler(load)
        else:
            drop(msg.subject, f"it describes {load.instance}")

    return await bus.subscribe_raw(bus.subjects.load_all, receive)
