"""What came of each directive: counted, and told to whoever listens."""

from collections import Counter
from collections.abc import Callable
from enum import StrEnum


class DirectiveOutcome(StrEnum):
    """A directive is honoured or clipped when it is given, and ends in at most one other way."""

    HONOURED = "honoured"
    CLIPPED = "clipped"
    EXPIRED = "expired"
    EVICTED = "evicted"


class Directive:
    """One explicit wish of one request or pin. `blocks` were granted of the `asked` ones."""

    __slots__ = ("asked", "blocks", "ended", "priority", "tenant", "ttl_s")

    def __init__(self, tenant: str, priority: int, ttl_s: float | None) -> None:
        self.tenant = tenant
        self.priority = priority
        self.ttl_s = ttl_s
        self.asked = 0
        self.blocks = 0
        self.ended = False

    @property
    def granted(self) -> DirectiveOutcome:
        return DirectiveOutcome.CLIPPED if self.blocks < self.asked else DirectiveOutcome.HONOURED


class Outcomes:
    """Counts since the start. `tell` is called once for each outcome of a directive."""

    def __init__(self, tell: Callable[[Directive, DirectiveOutcome], None] | None = None) -> None:
        self.counts: Counter[DirectiveOutcome] = Counter(dict.fromkeys(DirectiveOutcome, 0))
        self._tell = tell

    def granted(self, directive: Directive) -> DirectiveOutcome:
        """All of its blocks that exist now have been asked for."""
        self._note(directive, directive.granted)
        return directive.granted

    def ended(self, directive: Directive, outcome: DirectiveOutcome) -> None:
        """The first of its blocks has expired or was evicted early."""
        if not directive.ended:
            directive.ended = True
            self._note(directive, outcome)

    def _note(self, directive: Directive, outcome: DirectiveOutcome) -> None:
        self.counts[outcome] += 1
        if self._tell is not None:
            self._tell(directive, outcome)
