"""Options of simulated nodes: the block manager's configuration, its workers' waits, and links."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvmesh.bus.messages import Instance
from kvmesh.kvbm.core.blocks.block import ARENA, DISK
from kvmesh.kvbm.core.config import KvbmConfig, manager_config
from kvmesh.settings.schema import KvbmSettings, MockSettings, WorkerSettings

LOAD_SHARE = 3  # of a worker's hang timeout, as live engines have it


@dataclass(frozen=True)
class LinkSpeeds:
    """Bytes per second in each direction. A disk serves reads and writes one after the other.

    `host` is that of each worker's link to the memory of its node, `network` and `store` are those
    of a node's links to all other nodes and to the remote store.
    """

    host: float = 25e9
    disk: float = 6e9
    network: float = 64e9
    store: float = 5e9


@dataclass(frozen=True)
class NodeOptions:
    """`count` nodes, each with a kvbm; worker n runs on node n modulo `count`.

    `bytes_per_token` is the size of the KV. `remote_bytes` is the size of the remote store, 0 for
    none. With `peers` the nodes read from each other's memory. A worker's load waits `wait_s` for
    blocks that others compute, and ends after `deadline_s`; up to `queue` of its blocks wait for
    write-through. A message to a kvbm and its reply take `message_s`.
    """

    count: int
    config: KvbmConfig
    bytes_per_token: int = 131072
    remote_bytes: int = 0
    remote_lease_s: float = 86400.0
    peers: bool = False
    links: LinkSpeeds = LinkSpeeds()
    wait_s: float = 5.0
    deadline_s: float = 20.0
    queue: int = 4096
    message_s: float = 0.0005

    @property
    def host_bytes(self) -> int:
        return self.config.capacities[ARENA]

    @property
    def disk_bytes(self) -> int:
        return self.config.capacities.get(DISK, 0)


def node_options(
    count: int, kvbm: KvbmSettings, mock: MockSettings, worker: WorkerSettings, store_bps: float
) -> NodeOptions:
    """Nodes as `[kvbm]` describes them, with the links of `[mock]`; raises RetentionError.

    `store_bps` is the bandwidth between a node and the remote store.
    """
    deadline_s = worker.hang_timeout_s / LOAD_SHARE
    return NodeOptions(
        count=count,
        config=manager_config(kvbm),
        bytes_per_token=mock.kv_bytes_per_token,
        remote_bytes=kvbm.remote_bytes if kvbm.remote_url else 0,
        remote_lease_s=kvbm.remote_lease_s,
        peers=kvbm.peers,
        links=LinkSpeeds(
            host=mock.host_bytes_per_s,
            disk=mock.disk_bytes_per_s,
            network=mock.transfer_bytes_per_s,
            store=store_bps,
        ),
        wait_s=min(worker.shared_wait_s, deadline_s),
        deadline_s=deadline_s,
        queue=worker.write_through_blocks,
    )


def like_live(
    kvbm: KvbmSettings, cards: Sequence[Instance], block_bytes: int, fixed: Container[str] = ()
) -> KvbmSettings:
    """The settings with the sizes of the smallest live kvbm, except for those in `fixed`.

    The sizes are in blocks, since a stand-in of a mock has fewer bytes than its block. A kvbm that
    reads from beyond its node counts as one with peers unless the settings have a remote store.
    """
    stores = [card.store for card in cards if card.store is not None and card.store.tier_blocks]
    if not stores:
        return kvbm
    host, disk = (min(store.tier_blocks[tier] for store in stores) for tier in (0, 1))
    live = {
        "host_bytes": max(1 << 20, host * block_bytes),
        "disk_path": Path("live") if disk else None,
        "disk_bytes": max(1 << 20, disk * block_bytes),
        "peers": not kvbm.remote_url and all(store.key for store in stores),
    }
    own = {key: value for key, value in live.items() if key not in fixed}
    return msgspec.structs.replace(kvbm, **own)
