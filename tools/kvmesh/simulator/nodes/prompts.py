"""Prompts of simulated requests as a node's block manager sees them."""

from array import array
from dataclasses import dataclass

import numpy as np

from kvmesh.bus.messages import KvLayout, LayerLayout, Retain
from kvmesh.hashing import DIGEST_BYTES, HASH_BYTES
from kvmesh.worker.enginecore.sequence import Sequence
from kvmesh.worker.engines.mock.node_tiers import retained


@dataclass(frozen=True, slots=True)
class NodePrompt:
    """Leading full blocks of a sequence: sequence hashes and local hashes, one per block."""

    hashes: "array[int]"
    local: "array[int]"
    salt: int
    tenant: str
    session: str | None
    retention: list[Retain]

    @property
    def blocks(self) -> int:
        return len(self.hashes)

    @property
    def digests(self) -> bytes:
        """Packed digests: simulated prompts do not collide, so the hashes identify blocks."""
        packed = np.zeros((self.blocks, DIGEST_BYTES // HASH_BYTES), dtype=np.uint64)
        packed[:, 0] = np.frombuffer(self.hashes, dtype=np.uint64)
        return packed.tobytes()


def node_prompt(sequence: Sequence, blocks: int) -> NodePrompt:
    """The first `blocks` blocks of a sequence."""
    request = sequence.request
    claims = request.retention
    return NodePrompt(
        hashes=sequence.sequence_hashes[:blocks],
        local=sequence.local_hashes[:blocks],
        salt=request.salt,
        tenant=request.tenant,
        session=claims.session if claims is not None else None,
        retention=retained(sequence),
    )


def simulated_layout(block_size: int, bytes_per_token: int) -> KvLayout:
    """A layout of blocks with so many bytes for each token."""
    layers = [LayerLayout(heads=1, key_size=bytes_per_token, value_size=0)]
    return KvLayout(
        weights="simulated", dtype="simulated", item_bytes=1, block_size=block_size, layers=layers
    )
