"""KV events of one rank in an index."""

from typing import Any

from kvmesh.bus.messages import Cleared, KvEvent, Removed


def apply_to_index(index: Any, event: KvEvent) -> None:
    """Change rank 0 of an index by an event; its parent is there before it."""
    if isinstance(event, Cleared):
        index.clear(0, event.tier)
    elif isinstance(event, Removed):
        index.remove(0, event.tier, event.engine)
    elif event.previous is not None:
        index.attach(0, event.tier, event.previous, event.engine, event.local)
    else:
        assert index.store(0, event.tier, event.parent, event.engine, event.local, event.salt)
