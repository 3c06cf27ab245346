"""A question on a subject of its own that finds out if a process is there and its loop runs.

It is no command, so that others than those who command may ask.
"""

import msgspec

from kvmesh.bus.client import Bus, Subscription, returning
from kvmesh.bus.messages import ControlReply, Ping

_pings = msgspec.msgpack.Decoder(Ping)
_replies = msgspec.msgpack.Decoder(ControlReply)


async def ping(bus: Bus, instance: str, timeout: float) -> None:
    """Return once it has answered, within `timeout` seconds; else NoResponder or RequestTimeout."""
    await bus.request(bus.subjects.ping(instance), Ping(), _replies, timeout)


async def answer_pings(bus: Bus, instance: str) -> Subscription:
    """Answer from the event loop of this process, whatever else it does."""
    subject = bus.subjects.ping(instance)
    return await bus.serve(subject, _pings, returning(_here), on_malformed=_not_understood)


def _here(_: Ping) -> ControlReply:
    return ControlReply(True)


def _not_understood(reason: str) -> ControlReply:
    return ControlReply(False, reason)
