"""Telling a stream from one that was rewound: its numbers used again for other messages.

A server that loses what it had not yet written to disk, or gets an older store directory back,
goes on counting from there. Neither the stream's creation time nor its last number tells: the time
at which the message of a known number was stored does.
"""

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound

SAME_S = 1e-4  # the two ways to learn when a message was stored differ in their last digits


async def is_another(bus: Bus, stream: str, seq: int, stored: float) -> bool:
    """Whether number `seq` is now a message that was not stored at `stored`; False if it is none.

    The stream's leader is asked: a replica that answers in its place may be behind.
    """
    try:
        found = await bus.js.get_msg(stream, seq=seq)
    except NotFound:
        return False
    return found.time is None or abs(found.time.timestamp() - stored) > SAME_S
