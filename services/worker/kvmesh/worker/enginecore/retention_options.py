"""Options of retention on a rank, of any engine that retains blocks by kvmesh's rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.retention.claims import RetentionWish
from kvmesh.retention.token_ranges import DEFAULTS


@dataclass(frozen=True, kw_only=True)
class RetentionOptions:
    """`budget` is the share of all blocks that a tenant may retain by claims.

    `defaults` are the claims for each kind of token without an explicit directive. Sessions without
    a request for `session_idle_s` seconds are forgotten, as are claims without an end on blocks
    unused for as long. The oldest sessions are forgotten when all recorded prompts have more than
    `session_blocks` hashes per block of the rank.
    """

    budget: float = 0.5
    session_idle_s: float = 3600.0
    session_blocks: int = 64
    defaults: Mapping[str, RetentionWish] = field(default_factory=lambda: DEFAULTS)
