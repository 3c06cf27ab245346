"""What the operator decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.kvbm.core.blocks.store import RemoteCounts
from kvmesh.retention.claims import RetentionWish
from kvmesh.retention.token_ranges import DEFAULTS


@dataclass(frozen=True)
class KvbmConfig:
    """Bytes, seconds; `budget` is a share of a tier per tenant.

    With `remote` there may be blocks beyond the node, with `shares` also a store for its own.
    """

    capacities: Mapping[int, int]
    budget: float = 0.5
    disk_frequency: float = 2.0
    remote: RemoteCounts | None = None
    shares: bool = False
    remote_frequency: float = 2.0
    decay_s: float = 300.0
    patience_s: float = 30.0
    moves: int = 32
    defaults: Mapping[str, RetentionWish] = field(default_factory=lambda: DEFAULTS)
