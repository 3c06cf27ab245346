"""Division of one index among processes: the shard that owns a prompt.

By *namespace*, a shard owns whole (model, adapter, tenant) namespaces: cheap to filter, but one
busy tenant stays on one shard. By *root*, a shard owns the prompts that begin with certain first
blocks, whatever their namespace. The first sequence hash of a prompt depends on both the namespace
and the first block, so a query divided by root identifies its owner by itself.
"""

import struct
from dataclasses import dataclass
from typing import Literal

from kvmesh.bus.messages import OverlapQuery
from kvmesh.hashing import sequence_hashes

_WORD = struct.Struct("<Q")


@dataclass(frozen=True)
class Shard:
    """Shard `number` of `count`."""

    number: int = 0
    count: int = 1
    by: Literal["namespace", "root"] = "namespace"

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise ValueError(f"shard {self.number} of {self.count}: count from 0")

    @property
    def whole(self) -> bool:
        return self.count == 1

    @property
    def label(self) -> str:
        """Name of the division and the shard; replicas of equal label are interchangeable."""
        return self.label_of(self.number)

    def label_of(self, number: int) -> str:
        return "whole" if self.whole else f"{self.by}-{number}of{self.count}"

    def owns_root(self, salt: int, local: bytes) -> bool:
        """True if this shard owns prompts that begin with these blocks (packed local hashes)."""
        if self.whole or not local:
            return True
        if self.by == "namespace":
            return salt % self.count == self.number
        return _first(sequence_hashes(local[:8], salt)) % self.count == self.number

    def owners(self, query: OverlapQuery) -> dict[int, list[int]]:
        """Indices of the prompts to query each shard for; shards without prompts are left out."""
        all_prompts = list(range(len(query.prompts)))
        if self.whole:
            return {self.number: all_prompts}
        if self.by == "namespace":
            known = query.salt is not None
            shards = [(query.salt or 0) % self.count] if known else list(range(self.count))
            return dict.fromkeys(shards, all_prompts)
        owners: dict[int, list[int]] = {}
        for index, prompt in enumerate(query.prompts):
            if prompt:
                owners.setdefault(_first(prompt) % self.count, []).append(index)
        return owners


def _first(hashes: bytes) -> int:
    """The first of packed hashes; raises ValueError if there is none."""
    if len(hashes) < _WORD.size:
        raise ValueError("a prompt must be whole 64-bit hashes")
    (hash_,) = _WORD.unpack_from(hashes)
    return int(hash_)
