"""Outcomes of explicit retention directives."""

from collections import Counter
from collections.abc import Callable
from enum import StrEnum


class DirectiveOutcome(StrEnum):
    """A directive is honoured or clipped when granted; later it may expire or be evicted, once."""

    HONOURED = "honoured"
    CLIPPED = "clipped"
    EXPIRED = "expired"
    EVICTED = "evicted"


class Directive:
    """One explicit retention directive of a request, or one pin; counts its blocks."""

    __slots__ = ("ended", "granted_blocks", "priority", "requested_blocks", "tenant", "ttl_s")

    def __init__(self, tenant: str, priority: int, ttl_s: float | None) -> None:
        self.tenant = tenant
        self.priority = priority
        self.ttl_s = ttl_s
        self.requested_blocks = 0
        self.granted_blocks = 0
        self.ended = False

    @property
    def grant_outcome(self) -> DirectiveOutcome:
        """CLIPPED if the budget refused some of the blocks, else HONOURED."""
        if self.granted_blocks < self.requested_blocks:
            return DirectiveOutcome.CLIPPED
        return DirectiveOutcome.HONOURED


class Outcomes:
    """Counts outcomes since the start; calls `on_outcome` for each."""

    def __init__(
        self, on_outcome: Callable[[Directive, DirectiveOutcome], None] | None = None
    ) -> None:
        self.counts: Counter[DirectiveOutcome] = Counter(dict.fromkeys(DirectiveOutcome, 0))
        self._on_outcome = on_outcome

    def record_grant(self, directive: Directive) -> DirectiveOutcome:
        """Record the grant of a directive whose existing blocks have all been claimed."""
        self._record(directive, directive.grant_outcome)
        return directive.grant_outcome

    def record_end(self, directive: Directive, outcome: DirectiveOutcome) -> None:
        """Record that a block of the directive expired or was evicted; only the first counts."""
        if not directive.ended:
            directive.ended = True
            self._record(directive, outcome)

    def _record(self, directive: Directive, outcome: DirectiveOutcome) -> None:
        self.counts[outcome] += 1
        if self._on_outcome is not None:
            self._on_outcome(directive, outcome)
