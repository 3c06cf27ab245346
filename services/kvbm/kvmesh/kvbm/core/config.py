"""Settings of the block manager."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.kvbm.core.blocks.store import RemoteTierConfig
from kvmesh.retention.claims import RetentionWish
from kvmesh.retention.token_ranges import DEFAULTS


@dataclass(frozen=True)
class KvbmConfig:
    """Capacities in bytes by tier, times in seconds; `tenant_share` of a tier bounds a tenant.

    `remote` enables the remote tier; with `shares`, this node offloads to a remote store.
    """

    capacities: Mapping[int, int]
    tenant_share: float = 0.5
    disk_frequency: float = 2.0
    remote: RemoteTierConfig | None = None
    shares: bool = False
    remote_frequency: float = 2.0
    decay_s: float = 300.0
    patience_s: float = 30.0
    max_moves: int = 32
    defaults: Mapping[str, RetentionWish] = field(default_factory=lambda: DEFAULTS)
