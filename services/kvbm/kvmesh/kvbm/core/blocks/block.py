"""Blocks, and their copies in the tiers.

A copy is *allocated* a slot, *staged* while it is being written, *registered* once its content is
final, and *dropped*: nobody finds it any more, and its slot is free as soon as nobody uses it.
"""

from dataclasses import dataclass, field
from enum import Enum

from kvmesh.bus.messages import KvLayout
from kvmesh.kvbm.core.blocks.slab_allocator import slot_bytes
from kvmesh.retention.claims import BlockRetention

ARENA, DISK, REMOTE = 1, 2, 3
TIERS = (ARENA, DISK, REMOTE)
MOST_FREQUENT = 64.0


@dataclass(slots=True, eq=False)
class Space:
    """The blocks of one model in one layout. `rank` is the model's place on the node's card.

    `block_bytes` are those of a block, `slot` those of its slot; `words` are those of the layout.
    """

    rank: int
    model: str
    layout: KvLayout
    block_bytes: int = field(init=False)
    slot: int = field(init=False)
    words: str = field(init=False)

    def __post_init__(self) -> None:
        self.words = self.layout.summary
        self.block_bytes = self.layout.block_bytes
        self.slot = slot_bytes(self.block_bytes)


class CopyState(Enum):
    STAGED = "staged"
    REGISTERED = "registered"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class Copy:
    """One block's bytes in one tier; `users` are tickets and moves that read or write them.

    The checksum is of these bytes: two computations of one block may differ in the last bits. What
    is `inbound` comes from another tier. `keep` says how dearly it is kept, if at all.
    """

    block: "Block"
    tier: int
    offset: int
    state: CopyState = CopyState.STAGED
    users: int = 0
    checksum: int = 0
    inbound: bool = False
    keep: BlockRetention | None = None

    @property
    def ready(self) -> bool:
        return self.state is CopyState.REGISTERED


@dataclass(slots=True)
class Frequency:
    """How often something is asked for: doubled by a hit, one less for each `decay_s`."""

    value: float = 1.0
    since: float = 0.0

    def now(self, now: float, decay_s: float) -> float:
        return max(0.0, self.value - (now - self.since) // decay_s)

    def hit(self, now: float, decay_s: float) -> None:
        value = self.value - (now - self.since) // decay_s
        self.value = 2.0 if value <= 1.0 else min(MOST_FREQUENT, 2 * value)
        self.since = now


@dataclass(slots=True, eq=False)
class Block:
    """What is known of a block, by its digest, wherever it is.

    `index` counts from the prompt's root; `parent` is the digest of the block before, `previous`
    its sequence hash, or the salt at the root. `touched` is the serial number of the last
    operation that named it.
    """

    digest: bytes
    parent: bytes | None
    space: Space
    tenant: str
    index: int
    previous: int
    local: int
    sequence: int
    salt: int
    touched: int = 0
    uses: Frequency = field(default_factory=Frequency)
    copies: dict[int, Copy] = field(default_factory=dict)

    @property
    def name(self) -> int:
        """How KV events name it."""
        return int.from_bytes(self.digest[:8], "little")

    def ready(self, tier: int) -> Copy | None:
        """Its registered copy in a tier."""
        copy = self.copies.get(tier)
        return copy if copy is not None and copy.ready else None
