"""Measurements of simulated nodes."""

from dataclasses import dataclass, field


@dataclass
class NodeRecord:
    """Totals of one node: bytes by link, and what its workers loaded.

    `to_engines` and `from_engines` are bytes over the links of its workers; `network` and
    `store_read` are bytes that the node received. `disk_rewritten` are bytes of blocks that the
    disk had held before.
    """

    name: str
    to_engines: int = 0
    from_engines: int = 0
    disk_read: int = 0
    disk_written: int = 0
    disk_rewritten: int = 0
    network: int = 0
    store_read: int = 0
    store_written: int = 0
    loads: int = 0
    skipped_blocks: int = 0
    on_disk: set[bytes] = field(default_factory=set)
