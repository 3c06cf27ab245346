"""What is asked for a block, and where it stands in the order of eviction because of that."""

from typing import NamedTuple

from kvmesh.retention.outcomes import Directive

DEFAULT_LEVEL = 35
MAX_LEVEL = 100
THINKING_LEVEL = -1


class EvictionRank(NamedTuple):
    """A place in the order of eviction: what compares lower goes first. It holds until `until`.

    Levels are the priorities 0 to 100 of TensorRT-LLM's retention, and -1. Times are seconds on
    the caller's clock, above 0.
    """

    level: int
    until: float


UNCLAIMED = EvictionRank(DEFAULT_LEVEL, 0.0)


class RetentionWish(NamedTuple):
    """What a caller or a default asks for some blocks; `ttl_s` counts from each use.

    `directive` is the place among the explicit directives of the request, None for a default.
    """

    level: int = DEFAULT_LEVEL
    ttl_s: float | None = None
    directive: int | None = None

    @property
    def plain(self) -> bool:
        """Whether it asks for nothing: the same as no wish."""
        return self.level == DEFAULT_LEVEL and self.ttl_s is None

    @property
    def keeps(self) -> bool:
        """Whether it asks for more than others get, which a budget bounds."""
        return self.level > DEFAULT_LEVEL or (
            self.level == DEFAULT_LEVEL and self.ttl_s is not None
        )


class RetentionClaim(NamedTuple):
    """A wish that was granted until `deadline`, which each use moves to `ttl_s` after it."""

    wish: RetentionWish
    deadline: float
    ttl_s: float
    directive: Directive | None = None

    @property
    def standing(self) -> EvictionRank:
        return EvictionRank(self.wish.level, self.deadline)

    def renewed(self, now: float) -> "RetentionClaim":
        """The claim as of a use at `now`."""
        return self._replace(deadline=now + self.ttl_s)


class BlockRetention:
    """The claims on one block, or on several that have the same. A tenant's blocks are its own.

    `claims` are by what was asked, best first: each later one has a later deadline. `pins` are by
    id. `charged`: counts against the tenant's budget.
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
        """The same for a part of the blocks."""
        other = BlockRetention(self.tenant)
        other.claims, other.pins, other.charged = self.claims, dict(self.pins), self.charged
        return other

    @property
    def all(self) -> tuple[RetentionClaim, ...]:
        return (*self.claims, *self.pins.values())

    @property
    def keeps(self) -> bool:
        """Whether any claim asks for more than others get."""
        return any(claim.wish.keeps for claim in self.all)

    def standing(self, now: float) -> EvictionRank:
        """Where the claims that still hold put the block."""
        return max((c.standing for c in self.all if c.deadline > now), default=UNCLAIMED)

    def add(self, claim: RetentionClaim) -> None:
        """One more wish for blocks that several use: whatever asks for most counts at any time."""
        if any(_covers(known, claim) for known in self.claims):
            return
        rest = [known for known in self.claims if not _covers(claim, known)]
        self.claims = tuple(sorted([*rest, claim], key=lambda c: c.standing, reverse=True))

    def lift(self) -> None:
        """Somebody uses the block who does not think little of it."""
        self.claims = tuple(c for c in self.claims if c.wish.level >= DEFAULT_LEVEL)

    def renew(self, now: float) -> None:
        """The block was used at `now`: times to live start again."""
        self.claims = tuple(claim.renewed(now) for claim in self.claims)

    def lapse(self, now: float) -> list[RetentionClaim]:
        """Drop what is past its deadline; returns it."""
        gone = [claim for claim in self.all if claim.deadline <= now]
        if gone:
            self.claims = tuple(c for c in self.claims if c.deadline > now)
            self.pins = {pin: c for pin, c in self.pins.items() if c.deadline > now}
        return gone


def _covers(one: RetentionClaim, other: RetentionClaim) -> bool:
    return one.wish.level >= other.wish.level and one.deadline >= other.deadline
