"""Table of ranks: one slot per data-parallel rank, with loads in arrays by slot."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import inf
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from msgspec.structs import replace

from kvmesh.bus.discovery.compatibility import Compatibility
from kvmesh.bus.messages import (
    TAINT,
    Capacity,
    Instance,
    Placement,
    RankKey,
    Role,
    Settled,
    Thresholds,
    adapter_name,
)
from kvmesh.router.state.arrays import ZERO, Floats, Slots
from kvmesh.router.state.kvbm_nodes import KvbmNodes
from kvmesh.router.state.unmet import Unmet, unmet_constraint

USABLE_SHARE = 0.95  # of a rank's blocks; the rest is for running requests, whose outputs grow
RECENT_MEMORIES = 4.0
DECODE_MEMORY = 0.02  # weight of a request in the mean
UNKNOWN_MEMORY = 100_000.0  # blocks of all ranks, if none is known
Serves: TypeAlias = Literal["all", "prefill", "decode"]
ROLES: dict[Serves, tuple[str, ...]] = {
    "all": ("aggregated", "decode"),
    "prefill": ("prefill",),
    "decode": ("decode",),
}
_ANYWHERE = Placement()
_NO_CAPACITY = Capacity(blocks=0, max_sequences=0, max_batched_tokens=0)


class Rank(NamedTuple):
    """The rank in a slot. `worker` is the name, which is stable over restarts."""

    instance: str
    worker: str
    rank: int


class Column(Protocol):
    """One number per slot."""

    def __getitem__(self, slot: int, /) -> float: ...

    def __setitem__(self, slot: int, value: float, /) -> None: ...


@dataclass(slots=True)
class Cells:
    """Scalar access to the columns of a RankTable, over the same memory: faster than arrays."""

    prefill_tokens: Column
    active_blocks: Column
    correction_tokens: Column
    correction_blocks: Column
    requests: Column
    total_blocks: Column
    step_tokens: Column
    recent_blocks: Column
    load_ratio: Column
    held_tokens: Column


COLUMNS = tuple(field.name for field in fields(Cells))


class RankTable:
    """Slots are dense and reused; a rank gets one with its card or its first active request.

    An active request may name a rank before the rank's card arrives, or after its withdrawal. Such
    a slot counts load but is never eligible; it is freed with its last request.

    Arrays by slot:
    - `prefill_tokens`, `active_blocks`, `requests`: tracked load;
    - `correction_tokens`, `correction_blocks`: added to the tracked load, from engine reports;
    - `total_blocks`, `step_tokens`: KV blocks, and the maximum tokens of one step (0: unknown);
    - `recent_blocks`: blocks of placed prompts; they fade as RECENT_MEMORIES times the memory of
      all ranks is placed;
    - `load_ratio`: time to load a block from the node's kvbm over that to compute it (0: unknown);
    - `held_tokens`: the part of `prefill_tokens` that this router holds back from the engine;
    - `usable_blocks`: blocks that requests may use (inf: unknown), `min_usable_blocks` the least.

    `memory` are the KV blocks of all ranks.
    `decode_s` is the mean time from the first token of a request to its end, each weighted by the
    blocks that its end frees (0: unknown).
    `loads_measured` is set once some `load_ratio` is known. `cells` is scalar access to all but the
    usable blocks. `load_memory` is the memory of the first
    five columns, as `gather` reads them. `disaggregated` is set while some worker only prefills or
    needs handoffs.
    """

    cells: Cells

    prefill_tokens: Floats
    active_blocks: Floats
    requests: Floats
    correction_tokens: Floats
    correction_blocks: Floats
    total_blocks: Floats
    step_tokens: Floats
    recent_blocks: Floats
    load_ratio: Floats
    held_tokens: Floats
    usable_blocks: Floats
    min_usable_blocks: float

    def __init__(self, model: str) -> None:
        self.size = 0
        self.ranks: list[Rank] = []
        self.cards: dict[str, Instance] = {}
        self.slot_of: dict[tuple[str, int], int] = {}
        self.compatibility = Compatibility()
        self._free_slots: list[int] = []
        self._unconstrained_slots: dict[str, Slots] = {}
        self._index_keys: list[RankKey] = []
        self._index_slots = np.zeros(0, np.int64)
        self._index_version = -1
        self._node_of_slot = np.zeros(0, np.int64)
        self._nodes_version = -1
        self.nodes = KvbmNodes(model)
        self.version = 0
        self.disaggregated = False
        self.block_size = 0
        self.loads_measured = False
        self._decode_block_s = self._freed_blocks = 0.0
        self.memory = 0.0
        self._set_columns(np.zeros((len(COLUMNS), 16)))

    # membership

    def join(self, card: Instance) -> None:
        """Add or update the card of a worker or kvbm.

        A worker that is incompatible with the others gets no slots, and so no requests.
        """
        if card.role is Role.KVBM:
            self.nodes.join(card)
            self._invalidate()
        if card.model is None:
            return
        all_compatible = not self.incompatible
        self.compatibility.join(card)
        if all_compatible and not self.incompatible:
            self._add_card(card)
        else:
            self._readmit(card)

    @property
    def incompatible(self) -> dict[str, str]:
        """Workers left out as incompatible with the others: instance to reason."""
        return self.compatibility.misfits

    def adopt(self, settled: Settled | None) -> None:
        """Take what other processes have settled: other workers may be compatible then."""
        self.compatibility.adopt(settled)
        self._readmit()

    def _readmit(self, changed: Instance | None = None) -> None:
        """Update the slots after the set of compatible workers changed."""
        for instance in self.incompatible:
            if instance in self.cards:
                self._remove_card(instance)
        for card in self.compatibility.cards:
            if card.instance in self.incompatible:
                continue
            if card is changed or card.instance not in self.cards:
                self._add_card(card)

    def _add_card(self, card: Instance) -> None:
        if card.model is not None:
            self.block_size = card.model.block_size
        self.cards[card.instance] = card
        self._invalidate()
        capacity = card.capacity or _NO_CAPACITY
        for rank in range(capacity.dp_ranks):
            slot = self.slot(card.instance, rank)
            self.ranks[slot] = Rank(card.instance, card.name, rank)
            self.set_capacity(slot, capacity.blocks)
            self.step_tokens[slot] = capacity.max_batched_tokens

    def leave(self, instance: str) -> list[int]:
        """Remove a card; returns its slots, each of which stays while it has active requests."""
        all_compatible = not self.incompatible
        self.compatibility.leave(instance)
        if instance not in self.cards and self.nodes.leave(instance):
            self._invalidate()
        slots = self._remove_card(instance)
        if not all_compatible:
            self._readmit()
        return slots

    def _remove_card(self, instance: str) -> list[int]:
        card = self.cards.pop(instance, None)
        if card is None:
            return []
        self._invalidate()
        ranks = (card.capacity or _NO_CAPACITY).dp_ranks
        slots = [self.slot_of[instance, rank] for rank in range(ranks)]
        for slot in slots:
            self.correction_tokens[slot] = self.correction_blocks[slot] = 0
            self.release_if_idle(slot)
        return slots

    def _invalidate(self) -> None:
        self.version += 1
        self._unconstrained_slots.clear()
        self.disaggregated = any(
            card.serves == "prefill" or card.needs_handoff for card in self.cards.values()
        )

    def needs_handoff(self, instance: str) -> bool:
        """True if the worker computes no prompts itself."""
        card = self.cards.get(instance)
        return card is not None and card.needs_handoff

    def set_capacity(self, slot: int, blocks: int) -> None:
        """Set a rank's number of KV blocks (0: unknown)."""
        if self.cells.total_blocks[slot] != blocks:
            self.cells.total_blocks[slot] = blocks
            self.usable_blocks[slot] = USABLE_SHARE * blocks if blocks else inf
            self.min_usable_blocks = float(self.usable_blocks.min())
            self.memory = float(self.total_blocks.sum())

    def set_load_ratio(self, slot: int, ratio: float) -> None:
        """Set a rank's time to load a block over its time to compute it (0: unknown)."""
        self.cells.load_ratio[slot] = ratio
        self.loads_measured = self.loads_measured or ratio > 0

    def record_prompt(self, slot: int, blocks: float) -> None:
        """Record that a prompt of `blocks` blocks was placed on a rank."""
        memory = RECENT_MEMORIES * (self.memory or UNKNOWN_MEMORY)
        self.recent_blocks *= memory / (memory + blocks)
        self.cells.recent_blocks[slot] += blocks

    @property
    def decode_s(self) -> float:
        return self._decode_block_s / self._freed_blocks if self._freed_blocks else 0.0

    def record_decode(self, seconds: float, freed: float) -> None:
        """Record the time from a request's first token to its end, which freed so many blocks."""
        memory = DECODE_MEMORY if self._freed_blocks else 1.0
        self._decode_block_s += memory * (seconds * freed - self._decode_block_s)
        self._freed_blocks += memory * (freed - self._freed_blocks)

    def slot(self, instance: str, rank: int) -> int:
        """The slot of a rank, allocated if it has none."""
        slot = self.slot_of.get((instance, rank))
        if slot is None:
            slot = self.slot_of[instance, rank] = self._allocate(Rank(instance, instance, rank))
        return slot

    def find_slot(self, instance: str, rank: int) -> int | None:
        """The slot of a rank; None if it has none."""
        return self.slot_of.get((instance, rank))

    def _allocate(self, rank: Rank) -> int:
        self.version += 1
        if self._free_slots:
            slot = self._free_slots.pop()
            self.ranks[slot] = rank
            return slot
        if self.size == len(self.requests):
            self._set_columns(np.concatenate([self._columns, np.zeros_like(self._columns)], 1))
        self.ranks.append(rank)
        self.size += 1
        return self.size - 1

    def _set_columns(self, columns: Floats) -> None:
        self._columns = columns
        self._tracked, self._corrections = columns[:2], columns[2:4]
        self.load_memory = columns[:5].data.cast("B")
        for name, column in zip(COLUMNS, columns, strict=True):
            setattr(self, name, column)
        self.cells = Cells(*(memoryview(column).cast("B").cast("d") for column in columns))
        self.usable_blocks = np.where(self.total_blocks > 0, USABLE_SHARE * self.total_blocks, inf)
        self.min_usable_blocks = float(self.usable_blocks.min())

    def release_if_idle(self, slot: int) -> None:
        """Free the slot if its worker is gone and it has no active request."""
        rank = self.ranks[slot]
        if rank.instance in self.cards or self.requests[slot]:
            return
        if self.slot_of.pop((rank.instance, rank.rank), None) is None:
            return
        self.set_capacity(slot, 0)
        self._columns[:, slot] = 0
        self.version += 1
        self._free_slots.append(slot)

    def slots_of_keys(self, ranks: list[RankKey]) -> Slots:
        """Slots of the ranks in an index reply: `size` + n for node n's kvbm, `size` if unknown.

        Successive replies mostly list the same ranks, so the last result is cached.
        """
        if self._index_keys is not ranks or self._index_version != self.version:
            get, size = self.slot_of.get, self.size
            slots = [get((rank.instance, rank.rank), size) for rank in ranks]
            if self.nodes:
                node = self.nodes.of_kvbm
                pairs = zip(slots, ranks, strict=True)
                slots = [s if s < size else s + node(rank.instance) for s, rank in pairs]
            self._index_slots = np.array(slots, np.int64)
            self._index_keys, self._index_version = ranks, self.version
        return self._index_slots

    def node_of_slot(self) -> Slots:
        """Node number of each slot; 0 if the node has no kvbm."""
        if self._nodes_version != self.version:
            cards = (self.cards.get(rank.instance) for rank in self.ranks)
            numbers = [self.nodes.number(card.node) if card else 0 for card in cards]
            self._node_of_slot = np.array(numbers, np.int64)
            self._nodes_version = self.version
        return self._node_of_slot

    # filters

    def eligible(self, placement: Placement, adapter: str | None, serves: Serves) -> Slots:
        """The slots that meet a request's constraints, in ascending order."""
        if placement == _ANYWHERE and adapter is None:
            slots = self._unconstrained_slots.get(serves)
            if slots is None:
                cards = [c for c in self.serving(serves) if _matches(c, placement, adapter)]
                slots = self._unconstrained_slots[serves] = self._slots_of(cards)
            return slots
        if serves == "prefill":
            placement = replace(placement, instance=placement.prefill, rank=placement.prefill_rank)
        cards = [c for c in self.serving(serves) if _matches(c, placement, adapter)]
        return self._slots_of(cards, placement.rank)

    def matching(self, placement: Placement) -> list[Instance]:
        """The cards of the workers that a request's constraints allow, whatever its adapter."""
        return [c for c in self.serving("all") if _matches(c, placement, None)]

    def why_not_eligible(self, placement: Placement, adapter: str | None) -> str | Unmet:
        """The reason why no slot is eligible, as text for the caller; or a constraint."""
        if not self.cards:
            return "no worker serves this model"
        serving = self.serving("all")
        if not serving:
            return "every worker of this model is draining or only prefills"
        if adapter is not None and not any(_has_adapter(card, adapter) for card in serving):
            return f"no worker of this model has the adapter {adapter_name(adapter)!r}"
        if any(_matches(card, placement, adapter) for card in self.cards.values() if card.draining):
            return "every worker that meets the constraints of the request is draining"
        return unmet_constraint(serving, placement)

    def below_thresholds(self, limits: Thresholds, slots: Slots) -> Slots:
        """The slots that are below every threshold."""
        tokens, blocks = self.loads(slots)
        below = np.ones(len(slots), np.bool_)
        if limits.blocks is not None:
            below &= blocks < limits.blocks
        if limits.blocks_share is not None:
            total = self.total_blocks.take(slots)
            below &= (blocks < limits.blocks_share * total) | (total == 0)
        if limits.prefill_tokens is not None:
            below &= tokens < limits.prefill_tokens
        return slots[below]

    def loads(self, slots: Slots) -> Floats:
        """Corrected loads of some slots, one row each: tokens to prefill, and active blocks."""
        loads: Floats = self._tracked.take(slots, 1)
        loads += self._corrections.take(slots, 1)
        return np.maximum(loads, ZERO, out=loads)

    def preference(self, prefer: dict[str, float], slots: Slots) -> Floats:
        """exp(-tanh(w)) per slot, w the sum of the weights of its worker's labels."""
        weights = np.zeros(len(slots))
        for at, slot in enumerate(slots.tolist()):
            labels = self.cards[self.ranks[slot].instance].labels
            weights[at] = sum(
                prefer.get(f"{key}={value}", 0.0) + prefer.get(key, 0.0)
                for key, value in labels.items()
            )
        return np.exp(-np.tanh(weights))

    def serving(self, serves: Serves) -> list[Instance]:
        """The cards of the workers with this role that take requests."""
        roles = ROLES[serves]
        return [c for c in self.cards.values() if c.serves in roles and not c.draining]

    def _slots_of(self, cards: Iterable[Instance], rank: int | None = None) -> Slots:
        slots = [
            self.slot_of[card.instance, r]
            for card in cards
            for r in range((card.capacity or _NO_CAPACITY).dp_ranks)
            if rank is None or r == rank
        ]
        return np.array(sorted(slots), np.int64)


def _matches(card: Instance, placement: Placement, adapter: str | None) -> bool:
    if placement.instance is not None and card.instance != placement.instance:
        return False
    if card.instance in placement.exclude:
        return False
    if placement.allow and card.instance not in placement.allow:
        return False
    if any(k.startswith(TAINT) and k[len(TAINT) :] not in placement.tolerate for k in card.labels):
        return False
    if any(TAINT + taint not in card.labels for taint in placement.taints):
        return False
    return _has_adapter(card, adapter) and placement.labels.items() <= card.labels.items()


def _has_adapter(card: Instance, adapter: str | None) -> bool:
    return adapter is None or card.model is None or adapter in card.model.adapters
