"""The blocks of one prompt, decoded from a message."""

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
    """Packed digests, unpacked on access: most are never accessed."""

    __slots__ = ("_packed",)

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed) // DIGEST_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            first, end, _ = index.indices(len(self))
            return split_digests(self._packed[DIGEST_BYTES * first : DIGEST_BYTES * end])
        start = DIGEST_BYTES * index
        return self._packed[start : start + DIGEST_BYTES]

    def between(self, first: int, end: int) -> Iterator[bytes]:
        """The digests from `first` to before `end`, unpacked one at a time."""
        packed = self._packed
        for start in range(DIGEST_BYTES * first, DIGEST_BYTES * end, DIGEST_BYTES):
            yield packed[start : start + DIGEST_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        return iter(split_digests(self._packed))


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Digests, sequence and local hashes of a prompt's full blocks, from the root on.

    `traceparent` is that of a traced request, `request` the request's id if it is known.
    `conversation` and `tentative` are as in `Offer`.
    """

    space: Space
    digests: Digests
    sequence_hashes: "array[int]"
    local_hashes: "array[int]"
    salt: int
    tenant: str
    session: str | None
    retention: list[Retain]
    traceparent: str = ""
    request: str | None = None
    conversation: int = 0
    tentative: bool = False

    @classmethod
    def of(cls, message: Offer | Fetch, hashes: BlockHashes, space: Space) -> "PromptBlocks":
        """The blocks of `hashes`; `message` has all else.

        Raises ValueError if digests and hashes differ in number.
        """
        count, rest = divmod(len(hashes.digests), DIGEST_BYTES)
        if (
            rest
            or len(hashes.sequence_hashes) != HASH_BYTES * count
            or len(hashes.local) != HASH_BYTES * count
        ):
            raise ValueError("digests and hashes are not of the same blocks")
        return cls(
            space,
            Digests(hashes.digests),
            array("Q", hashes.sequence_hashes),
            array("Q", hashes.local),
            message.salt,
            message.tenant,
            message.session,
            message.retention,
            message.traceparent,
            message.request or None,
            message.conversation,
            message.tentative,
        )

    def __len__(self) -> int:
        return len(self.digests)

    def block(self, index: int) -> Block:
        """A new block without copies."""
        return Block(
            self.digests[index],
            self.digests[index - 1] if index and not self.space.layout.window else None,
            self.space,
            self.tenant,
            index,
            self.sequence_hashes[index - 1] if index else self.salt,
            self.local_hashes[index],
            self.sequence_hashes[index],
            self.salt,
        )
