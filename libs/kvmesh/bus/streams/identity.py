"""Detection of a rewound stream, which reuses sequence numbers for other messages.

A server that loses unwritten messages, or is restored from an older store directory, continues
counting from there. The stream's creation time and last sequence do not reveal it; the time at
which the message of a known sequence was stored does.
"""

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound

SAME_S = 1e-4  # the two sources of a storage time differ in their last digits


async def is_rewound(bus: Bus, stream: str, seq: int, stored: float) -> bool:
    """True if the message of sequence `seq` was stored at another time than `stored`.

    False if there is no such message. The request goes to the stream's leader: a replica could
    lag.
    """
    try:
        found = await bus.js.get_msg(stream, seq=seq)
    except NotFound:
        return False
    return found.time is None or abs(found.time.timestamp() - stored) > SAME_S
