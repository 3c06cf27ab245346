"""Promises of one tier: granted within a budget per tenant, and accounted for until they end.

A promise is soft: it orders eviction and never prevents it. The owner of the blocks holds a
`BlockRetention` for those on which there are claims, and says their `size` in every
call, in the budget's unit.
"""

from collections.abc import Callable, Sequence
from math import inf

from kvmesh.bus.messages import Retain
from kvmesh.retention.claims import (
    DEFAULT_LEVEL,
    MAX_LEVEL,
    UNCLAIMED,
    BlockRetention,
    EvictionRank,
    RetentionClaim,
    RetentionWish,
)
from kvmesh.retention.outcomes import Directive, DirectiveOutcome, Outcomes

FORGET_S = 3600.0


def directives(retention: Sequence[Retain], tenant: str) -> list[Directive]:
    """One for each explicit entry, in the order in which wishes count them."""
    return [Directive(tenant, r.priority, r.ttl_s) for r in retention if r.explicit]


class RetentionBudget:
    """At most `most` of each tenant's blocks are kept beyond their turn because it asked so.

    What is to be kept without an end is, until nobody has used it for `forget_s` seconds: else it
    would fill the budget for good.
    """

    def __init__(
        self,
        most: int,
        tell: Callable[[Directive, DirectiveOutcome], None] | None = None,
        forget_s: float = FORGET_S,
    ) -> None:
        self.most = most
        self._forget_s = forget_s
        self.outcomes = Outcomes(tell)
        self.charged: dict[str, int] = {}

    def grantable(self, keep: BlockRetention, size: int, wish: RetentionWish) -> int:
        """How much of `size` the tenant's budget has room for."""
        if keep.charged or not wish.keeps:
            return size
        return max(0, min(size, self.most - self.charged.get(keep.tenant, 0)))

    def claim(
        self,
        keep: BlockRetention,
        size: int,
        wish: RetentionWish,
        now: float,
        directive: Directive | None = None,
        alone: bool = True,
    ) -> bool:
        """Grant a wish on a use at `now`; False if the budget has no room for it.

        `alone`: only the session that asks uses the blocks, so that its last word counts. What
        others use as well keeps what they asked for.
        """
        self.lapse(keep, size, now)
        if directive is not None:
            directive.asked += size
        if self.grantable(keep, size, wish) < size:
            keep.renew(now)
            return False
        if directive is not None:
            directive.blocks += size
        self._set(keep, wish, now, directive, alone)
        self._settle(keep, size)
        return True

    def touch(self, keep: BlockRetention, size: int, now: float) -> None:
        """Blocks were used at `now` by somebody who asks nothing for them."""
        self.lapse(keep, size, now)
        keep.lift()
        keep.renew(now)
        self._settle(keep, size)

    def lapse(self, keep: BlockRetention, size: int, now: float) -> EvictionRank:
        """Drop claims whose time is over; where the blocks stand then."""
        for claim in keep.lapse(now):
            if claim.directive is not None:
                self.outcomes.ended(claim.directive, DirectiveOutcome.EXPIRED)
        self._settle(keep, size)
        return keep.standing(now) if keep else UNCLAIMED

    def pin(
        self,
        keep: BlockRetention,
        size: int,
        pin: str,
        priority: int,
        deadline: float,
        directive: Directive,
    ) -> bool:
        """Grant a pin until `deadline`, whoever else asks what; False if there is no room."""
        wish = RetentionWish(min(max(priority, DEFAULT_LEVEL), MAX_LEVEL), deadline)
        directive.asked += size
        if self.grantable(keep, size, wish) < size:
            return False
        directive.blocks += size
        keep.pins[pin] = RetentionClaim(wish, deadline, inf, directive)
        self._settle(keep, size)
        return True

    def unpin(self, keep: BlockRetention, size: int, pin: str) -> None:
        """Forget a pin."""
        keep.pins.pop(pin, None)
        self._settle(keep, size)

    def evicted(self, keep: BlockRetention, size: int, now: float) -> None:
        """So much of the blocks was given up for something else."""
        for claim in keep.all:
            if claim.directive is not None and claim.wish.keeps and claim.deadline > now:
                self.outcomes.ended(claim.directive, DirectiveOutcome.EVICTED)
        self.freed(keep, size)

    def freed(self, keep: BlockRetention, size: int) -> None:
        """So much of the blocks is gone because nobody wants it any more."""
        if keep.charged:
            self._charge(keep.tenant, -size)

    def _set(
        self,
        keep: BlockRetention,
        wish: RetentionWish,
        now: float,
        directive: Directive | None,
        alone: bool,
    ) -> None:
        if directive is None and any(claim.directive is not None for claim in keep.claims):
            keep.renew(now)  # a default does not revise what somebody asked for
            return
        if alone:
            keep.claims = ()
        elif wish.level >= DEFAULT_LEVEL:
            keep.lift()
        elif not keep.claims:
            return  # others use them and have asked for nothing
        keep.renew(now)
        if not wish.plain:
            ttl_s = self._forget_s if wish.ttl_s is None else wish.ttl_s
            keep.add(RetentionClaim(wish, now + ttl_s, ttl_s, directive))

    def _settle(self, keep: BlockRetention, size: int) -> None:
        if keep.charged != keep.keeps:
            keep.charged = keep.keeps
            self._charge(keep.tenant, size if keep.charged else -size)

    def _charge(self, tenant: str, size: int) -> None:
        left = self.charged.get(tenant, 0) + size
        if left:
            self.charged[tenant] = left
        else:
            self.charged.pop(tenant, None)
