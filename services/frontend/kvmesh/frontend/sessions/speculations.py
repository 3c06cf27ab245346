"""Open speculative prefills, by the prompt that each predicts. Pure."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator

from msgspec import Struct

from kvmesh.bus.messages import ComputedAhead, owner
from kvmesh.frontend.sessions.speculation_gate import FollowUp
from kvmesh.hashing import HASH_BYTES
from kvmesh.retention.session_blocks import common_prefix

MAX_OPEN = 1024
MAX_PER_BASE = 16
LIFETIME_S = 900.0


class Speculation(Struct, frozen=True):
    """A speculative prefill for a session: of a prefix of `blocks` blocks of its next prompt.

    The engine had the first `base_blocks` already; `base_hash` is the sequence hash of the last of
    them (packed), `end_hash` that of the last block of all. The engine was to compute
    `requested_tokens` after the request `after`, in whose follow-ups it counts as `follow_up`.
    """

    id: str
    tenant: str
    session: str | None
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

    def replaces(self, other: "Speculation") -> bool:
        """True if it is of the same session, whose next prompt is no longer the other one's."""
        return (self.tenant, self.session) == (other.tenant, other.session)

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
    """At most `limit` open speculations, looked up by the prompt that each predicted.

    Conversations that share a prefix may have speculations with the same base: a prompt that none
    of them fits ends that of its own session. The tenant with the most has the first one crowded
    out.
    """

    def __init__(self, limit: int = MAX_OPEN) -> None:
        self._limit = limit
        self._open: OrderedDict[str, Speculation] = OrderedDict()
        self._by_owner: defaultdict[str, OrderedDict[str, Speculation]] = defaultdict(OrderedDict)
        self._by_base: dict[tuple[str, bytes], list[Speculation]] = {}
        self._bases: Counter[int] = Counter()

    def add(self, speculation: Speculation) -> Iterator[Speculation]:
        """Add a speculation; yield those that it replaces or crowds out."""
        known = self._by_base.get((speculation.tenant, speculation.base_hash), [])
        replaced = [one for one in known if one.session == speculation.session]
        if len(known) >= MAX_PER_BASE and not replaced:
            replaced = known[:1]
        for one in replaced:
            self.remove(one.id)
            yield one
        if len(self._open) >= self._limit:
            crowd = max(self._by_owner.values(), key=len)
            oldest = next(iter(crowd.values()))
            self.remove(oldest.id)
            yield oldest
        self._open[speculation.id] = speculation
        self._by_owner[owner(speculation.tenant)][speculation.id] = speculation
        key = speculation.tenant, speculation.base_hash
        self._by_base.setdefault(key, []).append(speculation)
        self._bases[speculation.base_blocks] += 1

    def pop(self, tenant: str, session: str | None, sequence_hashes: bytes) -> Speculation | None:
        """Remove and return the speculation on a session's prompt of these packed hashes."""
        other = None
        for base in self._bases:
            last = sequence_hashes[(base - 1) * HASH_BYTES : base * HASH_BYTES]
            for one in self._by_base.get((tenant, last), ()):
                if one.fits(sequence_hashes):
                    return self.remove(one.id)
                if session is not None and one.session == session:
                    other = one
        return self.remove(other.id) if other is not None else None

    def remove(self, speculation: str) -> Speculation | None:
        """Remove and return a speculation by its id; None if it is not open."""
        found = self._open.pop(speculation, None)
        if found is None:
            return None
        of_owner = self._by_owner[owner(found.tenant)]
        del of_owner[speculation]
        if not of_owner:
            del self._by_owner[owner(found.tenant)]
        key = found.tenant, found.base_hash
        rest = [one for one in self._by_base.pop(key) if one is not found]
        if rest:
            self._by_base[key] = rest
        self._bases[found.base_blocks] -= 1
        if not self._bases[found.base_blocks]:
            del self._bases[found.base_blocks]
        return found

    def expire(self, now: float) -> Iterator[Speculation]:
        """Remove and yield those whose prompt has not arrived in time, oldest first."""
        while self._open:
            oldest = next(iter(self._open.values()))
            if oldest.expires > now:
                return
            self.remove(oldest.id)
            yield oldest
