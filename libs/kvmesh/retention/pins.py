"""Prefixes that somebody would like to be kept for a while, by the id under which they asked."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvmesh.retention.outcomes import Directive
from kvmesh.retention.session_blocks import common_prefix

K = TypeVar("K", bound=Hashable)
MAX_PINS = 4096


class Pinned(NamedTuple, Generic[K]):
    """The blocks of a prefix, from the root on; a preference until `deadline`."""

    id: str
    prompt: Sequence[K]
    priority: int
    deadline: float
    directive: Directive


class PinTable(Generic[K]):
    """At most `most` pins: what is one too many replaces one of the owner that has the most.

    It is the one that would end first of those.
    """

    def __init__(self, most: int = MAX_PINS) -> None:
        self._most = most
        self._pins: dict[str, Pinned[K]] = {}
        self._by_root: dict[K, dict[str, Pinned[K]]] = {}
        self._owned: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._pins)

    def put(self, pin: Pinned[K]) -> list[Pinned[K]]:
        """Add a pin of at least one block; returns those that it ends, the same id's first."""
        over = [old] if (old := self.remove(pin.id)) is not None else []
        if len(self._pins) >= self._most:
            over.append(self._make_room(pin.directive.tenant))
        self._owned[pin.directive.tenant] += 1
        self._pins[pin.id] = pin
        self._by_root.setdefault(pin.prompt[0], {})[pin.id] = pin
        return over

    def _make_room(self, newcomer: str) -> Pinned[K]:
        """End a pin of whoever has the most; of the newcomer, if nobody has more than that."""
        payer, most = self._owned.most_common(1)[0]
        if self._owned[newcomer] == most:
            payer = newcomer
        theirs = [known for known in self._pins.values() if known.directive.tenant == payer]
        first = min(theirs, key=lambda known: known.deadline)
        self.remove(first.id)
        return first

    def remove(self, pin: str) -> Pinned[K] | None:
        """Forget a pin; None if there is no such."""
        known = self._pins.pop(pin, None)
        if known is not None:
            self._owned[known.directive.tenant] -= 1
            if not self._owned[known.directive.tenant]:
                del self._owned[known.directive.tenant]
            root = known.prompt[0]
            del self._by_root[root][pin]
            if not self._by_root[root]:
                del self._by_root[root]
        return known

    def along(self, prompt: Sequence[K], now: float) -> Iterator[tuple[Pinned[K], int]]:
        """Pins that hold on leading blocks of a prompt, and on how many of them."""
        alike = self._by_root.get(prompt[0], {}) if prompt and self._by_root else {}
        for pin in list(alike.values()):
            if pin.deadline > now:
                yield pin, common_prefix(prompt, pin.prompt)
            else:
                self.remove(pin.id)
