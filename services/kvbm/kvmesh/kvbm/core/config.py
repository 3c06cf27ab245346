"""Settings of the block manager."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.kvbm.core.blocks.block import ARENA, DISK
from kvmesh.kvbm.core.blocks.store import RemoteTierConfig
from kvmesh.retention.claims import RetentionWish
from kvmesh.retention.token_ranges import DEFAULTS, parse_defaults
from kvmesh.settings.schema import KvbmSettings

MAX_REMOTE_BLOCKS = 1 << 20
PEER_LEASE_S = 10.0


@dataclass(frozen=True)
class KvbmConfig:
    """Capacities in bytes by tier, times in seconds; `tenant_share` of a tier bounds a tenant.

    `remote` enables the remote tier; with `shares`, this node offloads to a remote store. With
    `restores`, blocks are loaded ahead of forecast returns.
    """

    capacities: Mapping[int, int]
    tenant_share: float = 0.5
    disk_frequency: float = 2.0
    remote: RemoteTierConfig | None = None
    shares: bool = False
    remote_frequency: float = 2.0
    patience_s: float = 30.0
    max_moves: int = 32
    restores: bool = True
    defaults: Mapping[str, RetentionWish] = field(default_factory=lambda: DEFAULTS)

    @property
    def expects_returns(self) -> bool:
        """True if forecasts of returns matter: blocks may be restored from a lower tier."""
        return self.restores and (DISK in self.capacities or self.remote is not None)


def manager_config(settings: KvbmSettings) -> KvbmConfig:
    """The manager's configuration; raises RetentionError."""
    shares = bool(settings.remote_url)
    lease_s = settings.remote_lease_s if shares else PEER_LEASE_S
    disk = {DISK: settings.disk_bytes} if settings.disk_path is not None else {}
    return KvbmConfig(
        capacities={ARENA: settings.host_bytes, **disk},
        tenant_share=settings.tenant_share,
        disk_frequency=settings.disk_frequency,
        remote=RemoteTierConfig(MAX_REMOTE_BLOCKS, lease_s) if shares or settings.peers else None,
        shares=shares,
        remote_frequency=settings.remote_frequency,
        patience_s=settings.compute_patience_s,
        restores=settings.restore == "auto",
        defaults=parse_defaults(settings.retention),
    )
