"""A question on a subject of its own that finds out if a process is there and its loop runs.

It is no command, so that others than those who command may ask.
"""

import msgspec
from nats.aio.subscription import Subscription

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import ControlReply, Ping

_pings = msgspec.msgpack.Decoder(Ping)


async def ping(bus: Bus, instance: str, timeout: float) -> None:
    """Return once it has answered, within `timeout` seconds; else NoResponder or RequestTimeout."""
    await bus.request(bus.subjects.ping(instance), Ping(), ControlReply, timeout)


async def answer_pings(bus: Bus, instance: str) -> Subscription:
    """Answer from the event loop of this process, whatever else it does."""
    return await bus.answer(bus.subjects.ping(instance), _pings, _here, _not_understood)


def _here(_: Ping) -> ControlReply:
    return ControlReply(True)


def _not_understood(reason: str) -> ControlReply:
    return ControlReply(False, reason)
