"""KV memory by tier: of engines, with what they hold, and of block managers. Pure."""

from collections.abc import Iterable, Mapping

from kvmesh.bus.messages import Instance
from kvmesh.observer.cache_text import TIERS
from kvmesh.observer.columns import RowColumn, RowView, count_text, share_text
from kvmesh.observer.fleet import FleetRow
from kvmesh.runtime.quantities import size

ENGINES, BLOCK_MANAGERS = "engines", "block managers"


class TierRow:
    """One tier of all engines, or of all block managers; None is what the bus does not tell."""

    def __init__(self, number: int, owner: str) -> None:
        self.number = number
        self.tier = TIERS[number]
        self.owner = owner
        self.processes = 0
        self.blocks: int | None = None
        self.bytes: int | None = None
        self.in_use: float | None = None
        self.cached: float | None = None

    def add(self, blocks: int | None, bytes_: int | None = None) -> None:
        """Count the tier of one process; 0 blocks are unknown."""
        self.processes += 1
        if blocks:
            self.blocks = (self.blocks or 0) + blocks
        if bytes_:
            self.bytes = (self.bytes or 0) + bytes_


def tier_rows(cards: Mapping[str, Instance], fleet: Iterable[FleetRow]) -> list[TierRow]:
    """The tiers that any process has, from the fastest to the slowest."""
    engines = {number: TierRow(number, ENGINES) for number in range(len(TIERS))}
    managers = {number: TierRow(number, BLOCK_MANAGERS) for number in range(1, len(TIERS))}
    used = cached = 0.0
    for row in fleet:
        if row.kv_blocks is not None:
            engines[0].add(row.kv_blocks)
            used += row.kv_blocks * (row.kv_used or 0.0)
            cached += row.kv_blocks * (row.kv_cached or 0.0)
    if engines[0].blocks:
        engines[0].in_use = used / engines[0].blocks
        engines[0].cached = cached / engines[0].blocks
    for card in cards.values():
        if card.capacity is not None:
            for number, blocks in enumerate(card.capacity.tier_blocks, 1):
                if blocks and number in engines:
                    engines[number].add(blocks * card.capacity.dp_ranks)
        if card.store is not None:
            for number, bytes_ in enumerate(card.store.tier_bytes, 1):
                if bytes_ and number in managers:
                    known = card.store.tier_blocks[number - 1 : number]
                    managers[number].add(known[0] if known else None, bytes_)
    found = [*engines.values(), *managers.values()]
    return sorted((row for row in found if row.processes), key=lambda row: row.number)


def _told(value: float | None) -> str:
    """A share; of tiers below engines no message tells it."""
    return "see /metrics" if value is None else share_text(value)


TIER_VIEW = RowView(
    "tiers",
    (
        RowColumn("tier", "tier", number=False),
        RowColumn("owner", "of", number=False),
        RowColumn("processes", "processes", count_text),
        RowColumn("blocks", "capacity, blocks", count_text),
        RowColumn("bytes", "capacity", lambda value: "" if value is None else size(value)),
        RowColumn("in_use", "in use", _told),
        RowColumn("cached", "cached", _told),
    ),
    "number",
    False,
)
