"""Liveness probe of a process: its event loop replies on its own subject.

A ping is not a control command, so roles without permission for commands may send it.
"""

from kvmesh.bus.client import Bus, Subscription, returning
from kvmesh.bus.messages import ControlReply, MessageDecoder, Ping

_pings = MessageDecoder(Ping)
_replies = MessageDecoder(ControlReply)


async def ping(bus: Bus, instance: str, timeout: float, at_once: bool = False) -> None:
    """Return once `instance` replies; raises as `Bus.request` does."""
    subject = bus.subjects.ping(instance)
    await bus.request(subject, Ping(), _replies, timeout, at_once, repeats=True)


async def answer_pings(bus: Bus, instance: str) -> Subscription:
    """Reply to pings from this process's event loop."""
    subject = bus.subjects.ping(instance)
    return await bus.serve(subject, _pings, returning(_alive), on_malformed=_malformed)


def _alive(_: Ping) -> ControlReply:
    return ControlReply(True)


def _malformed(reason: str) -> ControlReply:
    return ControlReply(False, reason)
