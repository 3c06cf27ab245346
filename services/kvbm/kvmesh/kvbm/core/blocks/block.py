"""Blocks and their copies in the tiers.

A copy is *allocated* a slot, *staged* while it is written, *registered* once its content is final,
and *dropped*: lookups no longer find it, and its slot is freed when its last user releases it.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvmesh.bus.messages import EVICTED, KvLayout
from kvmesh.kvbm.core.blocks.slab_allocator import slot_bytes
from kvmesh.retention.awaited_prompts import Expectation
from kvmesh.retention.claims import BlockRetention

ARENA, DISK, REMOTE = 1, 2, 3
TIERS = (ARENA, DISK, REMOTE)
MAX_FREQUENCY = 64.0
DECAY_S = 300.0  # sessions return within minutes: what none uses for 5 min counts one use less


@dataclass(slots=True, eq=False)
class Space:
    """The blocks of one model in one layout. `rank` is the model's index on the node's card.

    Of an engine that divides its blocks, these are one part (`KvLayout.part`).

    A block has `block_bytes` bytes in a slot of `slot_bytes`; `summary` describes the layout in
    words.
    """

    rank: int
    model: str
    layout: KvLayout
    block_bytes: int = field(init=False)
    slot_bytes: int = field(init=False)
    summary: str = field(init=False)

    @property
    def is_lead(self) -> bool:
        """True for the part that stands for the blocks in events, cards and counts."""
        return not self.layout.part

    def __post_init__(self) -> None:
        self.summary = self.layout.summary
        self.block_bytes = self.layout.block_bytes
        self.slot_bytes = slot_bytes(self.block_bytes)


class DropCause(NamedTuple):
    """The reason of a copy's removal and the request in need, as in `Removed`."""

    reason: str
    request: str | None = None


EVICTION = DropCause(EVICTED)


class CopyState(Enum):
    STAGED = "staged"
    REGISTERED = "registered"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class Copy:
    """One block's bytes in one tier; `users` counts the tickets and moves that use them.

    The checksum is of these bytes: two computations of one block may differ in the last bits. An
    `inbound` copy is being moved here from another tier. `lapsed` is the reason why the copy has
    no retention that was requested for it since its last use: "expired" or "clipped". A `restored`
    copy was moved up before a request needed it, and has not been read.
    """

    block: "Block"
    tier: int
    offset: int
    state: CopyState = CopyState.STAGED
    users: int = 0
    checksum: int = 0
    inbound: bool = False
    retention: BlockRetention | None = None
    lapsed: str | None = None
    restored: bool = False

    @property
    def registered(self) -> bool:
        return self.state is CopyState.REGISTERED


@dataclass(slots=True)
class Frequency:
    """Use count that doubles with each hit and loses one per DECAY_S."""

    value: float = 1.0
    since: float = 0.0

    def at(self, now: float) -> float:
        return max(0.0, self.value - (now - self.since) // DECAY_S)

    def hit(self, now: float) -> None:
        value = self.value - (now - self.since) // DECAY_S
        self.value = 2.0 if value <= 1.0 else min(MAX_FREQUENCY, 2 * value)
        self.since = now


@dataclass(slots=True, eq=False)
class Block:
    """One block by its digest, with its copies in all tiers.

    `parent_digest` names the block that it is useless without; blocks of a window have none.
    `index` counts from the prompt's root; `parent_hash` is the sequence hash of the block before,
    or the salt at the root. `last_operation` is the serial number of the last operation that
    touched it, at the time `used`. `expected` are the returns of the prompts that it is part of. A
    block is `doubtful` if the session that used it may have left it.
    """

    digest: bytes
    parent_digest: bytes | None
    space: Space
    tenant: str
    index: int
    parent_hash: int
    local_hash: int
    sequence_hash: int
    salt: int
    last_operation: int = 0
    used: float = 0.0
    doubtful: bool = False
    expected: tuple[Expectation, ...] = ()
    frequency: Frequency = field(default_factory=Frequency)
    copies: dict[int, Copy] = field(default_factory=dict)

    @property
    def event_hash(self) -> int:
        """Its identity in KV events: the first 8 bytes of the digest."""
        return int.from_bytes(self.digest[:8], "little")

    def registered(self, tier: int) -> Copy | None:
        """Its registered copy in a tier."""
        copy = self.copies.get(tier)
        return copy if copy is not None and copy.registered else None
