"""The pins of all tenants, read from their bucket without the hashes of the pinned prompts."""

import time

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NotFound
from kvmesh.bus.storage.buckets import read_headers
from kvmesh.dashboard.state.pins import StoredHead, stored_head
from kvmesh.frontend.http.cache.pin_store import HEAD, PinHead

_heads = msgspec.json.Decoder(PinHead)


async def read_pins(bus: Bus) -> list[StoredHead]:
    """The pins in force; raises BusError."""
    try:
        found = await read_headers(bus, bus.subjects.pins_bucket)
    except NotFound:  # the first pin creates it
        return []
    now = time.time()
    pins = []
    for key, headers in found.items():
        try:
            head = _heads.decode(headers[HEAD])
        except (KeyError, msgspec.MsgspecError):
            continue
        if head.expires > now:
            pins.append(stored_head(key, head))
    return pins
