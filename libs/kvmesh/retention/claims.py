"""Retention claims on blocks, and the eviction rank that follows from them."""

from typing import NamedTuple

from kvmesh.retention.outcomes import Directive

DEFAULT_LEVEL = 35
MAX_LEVEL = 100
THINKING_LEVEL = -1
DOUBTFUL_LEVEL = -2  # of what may be dead: below all that a request can ask for


class EvictionRank(NamedTuple):
    """Position in the eviction order, valid until `until`: the lowest is evicted first.

    Levels are the priorities 0 to 100 of TensorRT-LLM's retention, -1 and -2. Times are seconds on
    the caller's clock, above 0.
    """

    level: int
    until: float


UNCLAIMED = EvictionRank(DEFAULT_LEVEL, 0.0)
DOUBTFUL = EvictionRank(DOUBTFUL_LEVEL, 0.0)


def rank_of(claimed: EvictionRank, doubtful: bool) -> EvictionRank:
    """The rank of blocks by their claims, and by whether they may be dead.

    Doubt, which is a guess, counts only for blocks that nothing retains longer than others.
    """
    return DOUBTFUL if doubtful and claimed <= UNCLAIMED else claimed


class RetentionWish(NamedTuple):
    """Retention requested for some blocks, by a caller or by a default.

    `ttl_s` counts from each use; None sets no deadline. `directive` is the index among the explicit
    directives of the request, None for a default.
    """

    level: int = DEFAULT_LEVEL
    ttl_s: float | None = None
    directive: int | None = None

    @property
    def is_default(self) -> bool:
        """True if the wish has no effect: blocks without a wish are treated the same."""
        return self.level == DEFAULT_LEVEL and self.ttl_s is None

    @property
    def needs_budget(self) -> bool:
        """True if the blocks are retained longer than unclaimed ones; a budget bounds these."""
        return self.level > DEFAULT_LEVEL or (
            self.level == DEFAULT_LEVEL and self.ttl_s is not None
        )


class RetentionClaim(NamedTuple):
    """A wish granted until `deadline`; each use of the block moves that to `ttl_s` later."""

    wish: RetentionWish
    deadline: float
    ttl_s: float
    directive: Directive | None = None

    @property
    def eviction_rank(self) -> EvictionRank:
        return EvictionRank(self.wish.level, self.deadline)

    def renewed(self, now: float) -> "RetentionClaim":
        """Return the claim after a use at `now`."""
        return self._replace(deadline=now + self.ttl_s)


class BlockRetention:
    """Claims and pins on one block, or on several blocks with equal claims, of one tenant.

    `claims` are sorted by level, highest first; each later one has a later deadline. `pins` are
    keyed by pin id. `charged` is true while the blocks count against the tenant's budget.
    """

    __slots__ = ("charged", "claims", "pins", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.claims: tuple[RetentionClaim, ...] = ()
        self.pins: dict[str, RetentionClaim] = {}
        self.charged = False

    def __bool__(self) -> bool:
        return bool(self.claims or self.pins)

    def copy(self) -> "BlockRetention":
        """Return a copy, for some of the blocks."""
        other = BlockRetention(self.tenant)
        other.claims, other.pins, other.charged = self.claims, dict(self.pins), self.charged
        return other

    @property
    def all_claims(self) -> tuple[RetentionClaim, ...]:
        """Claims and pins."""
        return (*self.claims, *self.pins.values())

    @property
    def needs_budget(self) -> bool:
        return any(claim.wish.needs_budget for claim in self.all_claims)

    def eviction_rank(self, now: float) -> EvictionRank:
        """Return the highest rank of the claims that are valid at `now`."""
        return max(
            (c.eviction_rank for c in self.all_claims if c.deadline > now), default=UNCLAIMED
        )

    def add(self, claim: RetentionClaim) -> None:
        """Add a claim on shared blocks: at any time the highest valid claim counts."""
        if any(_covers(known, claim) for known in self.claims):
            return
        rest = [known for known in self.claims if not _covers(claim, known)]
        self.claims = tuple(sorted([*rest, claim], key=lambda c: c.eviction_rank, reverse=True))

    def drop_low_claims(self) -> None:
        """Drop claims below the default level: the block has a user with a normal priority."""
        self.claims = tuple(c for c in self.claims if c.wish.level >= DEFAULT_LEVEL)

    def renew(self, now: float) -> None:
        """Restart all times to live: the block was used at `now`."""
        self.claims = tuple(claim.renewed(now) for claim in self.claims)

    def expire(self, now: float) -> list[RetentionClaim]:
        """Drop the claims and pins whose deadline has passed, and return them."""
        gone = [claim for claim in self.all_claims if claim.deadline <= now]
        if gone:
            self.claims = tuple(c for c in self.claims if c.deadline > now)
            self.pins = {pin: c for pin, c in self.pins.items() if c.deadline > now}
        return gone


def _covers(one: RetentionClaim, other: RetentionClaim) -> bool:
    return one.wish.level >= other.wish.level and one.deadline >= other.deadline
