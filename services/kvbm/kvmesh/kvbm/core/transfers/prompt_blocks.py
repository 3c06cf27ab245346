"""The blocks of one prompt, as a message describes them."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from kvmesh.blocks.digests import split_digests
from kvmesh.bus.messages import Fetch, Offer, Retain
from kvmesh.hashing import DIGEST_BYTES, HASH_BYTES
from kvmesh.kvbm.core.blocks.block import Block, Space
from kvmesh.prompt_delta.blocks import BlockHashes


class Digests(Sequence[bytes]):
    """Packed digests, one of which is cut out when it is asked for: most never are."""

    __slots__ = ("_packed",)

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed) // DIGEST_BYTES

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        if isinstance(place, slice):
            first, end, _ = place.indices(len(self))
            return split_digests(self._packed[DIGEST_BYTES * first : DIGEST_BYTES * end])
        start = DIGEST_BYTES * place
        return self._packed[start : start + DIGEST_BYTES]

    def between(self, first: int, end: int) -> Iterator[bytes]:
        """Those from `first` to before `end`, each cut out when it is asked for."""
        packed = self._packed
        for at in range(DIGEST_BYTES * first, DIGEST_BYTES * end, DIGEST_BYTES):
            yield packed[at : at + DIGEST_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        return iter(split_digests(self._packed))


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Digests, sequence and local hashes of its full blocks from the root on."""

    space: Space
    digests: Digests
    sequence_hashes: "array[int]"
    local: "array[int]"
    salt: int
    tenant: str
    session: str | None
    retention: list[Retain]

    @classmethod
    def of(cls, message: Offer | Fetch, names: BlockHashes, space: Space) -> "PromptBlocks":
        """What a message says of all these blocks; ValueError if they are not the same ones."""
        count, rest = divmod(len(names.digests), DIGEST_BYTES)
        if (
            rest
            or len(names.sequence_hashes) != HASH_BYTES * count
            or len(names.local) != HASH_BYTES * count
        ):
            raise ValueError("digests and hashes are not of the same blocks")
        return cls(
            space,
            Digests(names.digests),
            array("Q", names.sequence_hashes),
            array("Q", names.local),
            message.salt,
            message.tenant,
            message.session,
            message.retention,
        )

    def __len__(self) -> int:
        return len(self.digests)

    def block(self, index: int) -> Block:
        """A block that no tier has yet."""
        return Block(
            self.digests[index],
            self.digests[index - 1] if index else None,
            self.space,
            self.tenant,
            index,
            self.sequence_hashes[index - 1] if index else self.salt,
            self.local[index],
            self.sequence_hashes[index],
            self.salt,
        )
