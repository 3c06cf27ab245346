"""Block hashes of a workload's rounds, derived from its token tree."""

from dataclasses import dataclass

from kvmesh.hashing import HASH_BYTES, salt, sequence_hashes
from kvmesh.workload.model import Round, Workload


@dataclass(slots=True)
class RoundHashes:
    """Packed local and sequence hashes of a round, prompt and output together."""

    local: bytes
    sequence_hashes: bytes


class SimulatedPrompts:
    """Hashes of a workload's rounds at the engines' block size.

    Local hashes are derived from branch and position, so equal content has equal local hashes;
    caches and index compare nothing else.
    """

    def __init__(self, workload: Workload, model: str, block_size: int) -> None:
        self._workload = workload
        self._size = block_size
        self._zeros = b""
        self.salt = salt(model, "", "")

    def hashes(self, round_: Round) -> RoundHashes:
        """Hashes of a round's prompt and output."""
        return self.prefix(round_.output_branch, round_.input_tokens + round_.output_tokens)

    def prefix(self, branch: int, total: int) -> RoundHashes:
        """Hashes of the full blocks of the first `total` tokens along a branch."""
        local = self._local(branch, total)
        return RoundHashes(local, sequence_hashes(local, self.salt))

    def _local(self, branch: int, total: int) -> bytes:
        size = self._size
        if len(self._zeros) < total // size * HASH_BYTES:
            self._zeros = bytes(total // size * HASH_BYTES)
        parts = [
            sequence_hashes(self._zeros[: (end // size - start // size) * HASH_BYTES], branch)
            for branch, start, end in self._workload.tree.reversed_path(branch, total)
        ]
        return b"".join(reversed(parts))
