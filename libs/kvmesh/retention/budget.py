"""Retention budget of one tier: grants claims within a bound per tenant and accounts for them.

A claim is soft: it orders eviction and never prevents it. The owner of the blocks holds a
`BlockRetention` for claimed blocks and passes their `size` in every call, in the budget's unit.
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

UNLIMITED_TTL_S = 3600.0


def directives(retention: Sequence[Retain], tenant: str) -> list[Directive]:
    """Return one directive per explicit entry, in the order of `RetentionWish.directive`."""
    return [Directive(tenant, r.priority, r.ttl_s) for r in retention if r.explicit]


class RetentionBudget:
    """Bounds the blocks retained at each tenant's request to `max_size`.

    Wishes without a deadline end `unlimited_ttl_s` seconds after the last use of the blocks;
    otherwise they would occupy the budget for good.
    """

    def __init__(
        self,
        max_size: int,
        on_outcome: Callable[[Directive, DirectiveOutcome], None] | None = None,
        unlimited_ttl_s: float = UNLIMITED_TTL_S,
    ) -> None:
        self.max_size = max_size
        self._unlimited_ttl_s = unlimited_ttl_s
        self.outcomes = Outcomes(on_outcome)
        self.charged: dict[str, int] = {}

    def grantable(self, retention: BlockRetention, size: int, wish: RetentionWish) -> int:
        """Return how much of `size` the tenant's budget can grant."""
        if retention.charged or not wish.needs_budget:
            return size
        return max(0, min(size, self.max_size - self.charged.get(retention.tenant, 0)))

    def claim(
        self,
        retention: BlockRetention,
        size: int,
        wish: RetentionWish,
        now: float,
        directive: Directive | None = None,
        exclusive: bool = True,
    ) -> bool:
        """Grant a wish on a use at `now`; False if it exceeds the budget.

        `exclusive`: only the requesting session uses the blocks, so its wish replaces earlier ones.
        On shared blocks the claims of other sessions remain.
        """
        self.expire(retention, size, now)
        if directive is not None:
            directive.requested_blocks += size
        if self.grantable(retention, size, wish) < size:
            retention.renew(now)
            return False
        if directive is not None:
            directive.granted_blocks += size
        self._set_claim(retention, wish, now, directive, exclusive)
        self._update_charge(retention, size)
        return True

    def touch(self, retention: BlockRetention, size: int, now: float) -> None:
        """Record a use at `now` by a request without a wish for these blocks."""
        self.expire(retention, size, now)
        retention.drop_low_claims()
        retention.renew(now)
        self._update_charge(retention, size)

    def expire(self, retention: BlockRetention, size: int, now: float) -> EvictionRank:
        """Drop expired claims; return the eviction rank of the blocks after that."""
        for claim in retention.expire(now):
            if claim.directive is not None:
                self.outcomes.record_end(claim.directive, DirectiveOutcome.EXPIRED)
        self._update_charge(retention, size)
        return retention.eviction_rank(now) if retention else UNCLAIMED

    def pin(
        self,
        retention: BlockRetention,
        size: int,
        pin: str,
        priority: int,
        deadline: float,
        directive: Directive,
    ) -> bool:
        """Grant a pin until `deadline`, independent of claims; False if it exceeds the budget."""
        wish = RetentionWish(min(max(priority, DEFAULT_LEVEL), MAX_LEVEL), deadline)
        directive.requested_blocks += size
        if self.grantable(retention, size, wish) < size:
            return False
        directive.granted_blocks += size
        retention.pins[pin] = RetentionClaim(wish, deadline, inf, directive)
        self._update_charge(retention, size)
        return True

    def unpin(self, retention: BlockRetention, size: int, pin: str) -> None:
        """Remove a pin."""
        retention.pins.pop(pin, None)
        self._update_charge(retention, size)

    def on_evicted(self, retention: BlockRetention, size: int, now: float) -> None:
        """Account for `size` of the blocks, evicted to make space for other blocks."""
        for claim in retention.all_claims:
            if claim.directive is not None and claim.wish.needs_budget and claim.deadline > now:
                self.outcomes.record_end(claim.directive, DirectiveOutcome.EVICTED)
        self.on_dropped(retention, size)

    def on_dropped(self, retention: BlockRetention, size: int) -> None:
        """Account for `size` of the blocks, dropped because no session needs them."""
        if retention.charged:
            self._charge(retention.tenant, -size)

    def _set_claim(
        self,
        retention: BlockRetention,
        wish: RetentionWish,
        now: float,
        directive: Directive | None,
        exclusive: bool,
    ) -> None:
        if directive is None and any(c.directive is not None for c in retention.claims):
            retention.renew(now)  # a default does not override an explicit directive
            return
        if exclusive:
            retention.claims = ()
        elif wish.level >= DEFAULT_LEVEL:
            retention.drop_low_claims()
        elif not retention.claims:
            return  # other sessions use the blocks at the default level
        retention.renew(now)
        if not wish.is_default:
            ttl_s = self._unlimited_ttl_s if wish.ttl_s is None else wish.ttl_s
            retention.add(RetentionClaim(wish, now + ttl_s, ttl_s, directive))

    def _update_charge(self, retention: BlockRetention, size: int) -> None:
        if retention.charged != retention.needs_budget:
            retention.charged = retention.needs_budget
            self._charge(retention.tenant, size if retention.charged else -size)

    def _charge(self, tenant: str, size: int) -> None:
        charged = self.charged.get(tenant, 0) + size
        if charged:
            self.charged[tenant] = charged
        else:
            self.charged.pop(tenant, None)
