"""From a workload's tree of tokens to block hashes, as the mesh would compute them."""

from dataclasses import dataclass

from kvmesh.hashing import HASH_BYTES, salt, sequence_hashes
from kvmesh.workload.model import Round, Workload


@dataclass(slots=True)
class Hashes:
    """Packed local and sequence hashes of a round, of prompt and answer together."""

    local: bytes
    sequence_hashes: bytes


class SimulatedPrompts:
    """Hashes of a workload's rounds at the engines' block size.

    A block's place on its branch stands for its tokens: equal content, equal local hash, which is
    all that matters to caches and index.
    """

    def __init__(self, workload: Workload, model: str, block_size: int) -> None:
        self._workload = workload
        self._size = block_size
        self._places = b""
        self.salt = salt(model, "", "")

    def of(self, round_: Round) -> Hashes:
        local = self._local(round_)
        return Hashes(local, sequence_hashes(local, self.salt))

    def _local(self, round_: Round) -> bytes:
        size, total = self._size, round_.input_tokens + round_.output_tokens
        if len(self._places) < total // size * HASH_BYTES:
            self._places = bytes(total // size * HASH_BYTES)
        parts = [
            sequence_hashes(self._places[: (end // size - start // size) * HASH_BYTES], branch)
            for branch, start, end in self._workload.tree.back(round_.answer, total)
        ]
        return b"".join(reversed(parts))
