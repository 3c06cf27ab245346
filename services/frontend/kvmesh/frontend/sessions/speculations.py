"""Open speculative prefills, by the prompt that each predicts. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterator

from msgspec import Struct

from kvmesh.bus.messages import ComputedAhead
from kvmesh.frontend.sessions.speculation_gate import FollowUp
from kvmesh.hashing import HASH_BYTES
from kvmesh.retention.session_blocks import common_prefix

MAX_OPEN = 1024
LIFETIME_S = 900.0


class Speculation(Struct, frozen=True):
    """A speculative prefill of a prefix of `blocks` blocks.

    The engine had the first `base_blocks` already; `base_hash` is the sequence hash of the last of
    them (packed), `end_hash` that of the last block of all. The engine was to compute
    `requested_tokens` after the request `after`, in whose follow-ups it counts as `follow_up`.
    """

    id: str
    tenant: str
    instance: str
    model: str
    base_hash: bytes
    base_blocks: int
    end_hash: bytes
    blocks: int
    requested_tokens: int
    after: str
    follow_up: FollowUp
    expires: float

    def fits(self, sequence_hashes: bytes) -> bool:
        """True if the prompt of these packed sequence hashes starts with the whole prefix."""
        end = self.blocks * HASH_BYTES
        return sequence_hashes[end - HASH_BYTES : end] == self.end_hash

    def ahead(self, fits: bool, block_size: int) -> ComputedAhead:
        """The tokens that it was to compute of the real prompt, which fits or differs."""
        return ComputedAhead(
            prefetch=self.id,
            after=self.after,
            first=self.base_blocks * block_size,
            tokens=self.requested_tokens,
            differs=not fits,
        )


def common_blocks(one: bytes, other: bytes) -> int:
    """The number of leading blocks that two prompts share, from their packed sequence hashes."""
    return common_prefix(memoryview(one).cast("Q"), memoryview(other).cast("Q"))


class SpeculativePrefills:
    """At most `limit` open speculations, looked up by the prompt that each predicted."""

    def __init__(self, limit: int = MAX_OPEN) -> None:
        self._limit = limit
        self._open: OrderedDict[tuple[str, bytes], Speculation] = OrderedDict()
        self._bases: Counter[int] = Counter()

    def add(self, speculation: Speculation) -> Iterator[Speculation]:
        """Add a speculation; yield those that it replaces."""
        key = speculation.tenant, speculation.base_hash
        if key in self._open:
            yield self._remove(key)
        if len(self._open) >= self._limit:
            yield self._remove(next(iter(self._open)))
        self._open[key] = speculation
        self._bases[speculation.base_blocks] += 1

    def pop(self, tenant: str, sequence_hashes: bytes) -> Speculation | None:
        """Remove and return the speculation on the prompt of these packed sequence hashes."""
        for base in self._bases:
            key = tenant, sequence_hashes[(base - 1) * HASH_BYTES : base * HASH_BYTES]
            if key in self._open:
                return self._remove(key)
        return None

    def expire(self, now: float) -> Iterator[Speculation]:
        """Remove and yield those whose prompt has not arrived in time, oldest first."""
        while self._open and next(iter(self._open.values())).expires <= now:
            yield self._remove(next(iter(self._open)))

    def _remove(self, key: tuple[str, bytes]) -> Speculation:
        speculation = self._open.pop(key)
        self._bases[speculation.base_blocks] -= 1
        if not self._bases[speculation.base_blocks]:
            del self._bases[speculation.base_blocks]
        return speculation
