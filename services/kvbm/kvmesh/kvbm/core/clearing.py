"""Clearing of caches by tenant, model and tier."""

from kvmesh.bus.messages import CLEARED, Clear
from kvmesh.kvbm.core.blocks.block import REMOTE, Block, DropCause
from kvmesh.kvbm.core.blocks.store import Store


def clear(store: Store, message: Clear) -> int:
    """Drop the selected copies, also those in use or being written; return the number of blocks."""
    dropped = sum(_clear(store, block, message) for block in list(store.blocks.values()))
    if not message.tiers or REMOTE in message.tiers:
        store.discard_lapsed(lambda block: _names(message, block))
    return dropped


def _names(message: Clear, block: Block) -> bool:
    namespace = message.salt, message.tenant
    if message.salt is not None and (block.salt, block.tenant) != namespace:
        return False
    return message.model is None or block.space.model == message.model


def _clear(store: Store, block: Block, message: Clear) -> bool:
    if not _names(message, block):
        return False
    copies = [c for c in block.copies.values() if not message.tiers or c.tier in message.tiers]
    for copy in copies:
        store.discard(copy, DropCause(CLEARED))
    return bool(copies) and block.space.is_lead
