"""Pinned prefixes by pin id."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvmesh.retention.outcomes import Directive
from kvmesh.retention.session_blocks import common_prefix

K = TypeVar("K", bound=Hashable)
MAX_PINS = 4096


class Pinned(NamedTuple, Generic[K]):
    """A pinned prefix, from its first block on; a preference until `deadline`."""

    id: str
    prompt: Sequence[K]
    priority: int
    deadline: float
    directive: Directive


class PinTable(Generic[K]):
    """At most `max_pins` pins.

    Beyond that, a new pin replaces the one that ends first of the tenant with the most pins.
    """

    def __init__(self, max_pins: int = MAX_PINS) -> None:
        self._max_pins = max_pins
        self._pins: dict[str, Pinned[K]] = {}
        self._by_root: dict[K, dict[str, Pinned[K]]] = {}
        self._per_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._pins)

    def put(self, pin: Pinned[K]) -> list[Pinned[K]]:
        """Add a pin of at least one block; return the pins it replaces, the same id's first."""
        replaced = [old] if (old := self.remove(pin.id)) is not None else []
        if len(self._pins) >= self._max_pins:
            replaced.append(self._evict_for(pin.directive.tenant))
        self._per_tenant[pin.directive.tenant] += 1
        self._pins[pin.id] = pin
        self._by_root.setdefault(pin.prompt[0], {})[pin.id] = pin
        return replaced

    def _evict_for(self, newcomer: str) -> Pinned[K]:
        """Remove a pin of the tenant with the most; of `newcomer` if it has as many."""
        tenant, most = self._per_tenant.most_common(1)[0]
        if self._per_tenant[newcomer] == most:
            tenant = newcomer
        candidates = [pin for pin in self._pins.values() if pin.directive.tenant == tenant]
        first = min(candidates, key=lambda pin: pin.deadline)
        self.remove(first.id)
        return first

    def remove(self, pin: str) -> Pinned[K] | None:
        """Remove and return a pin; None if the id is unknown."""
        pinned = self._pins.pop(pin, None)
        if pinned is not None:
            self._per_tenant[pinned.directive.tenant] -= 1
            if not self._per_tenant[pinned.directive.tenant]:
                del self._per_tenant[pinned.directive.tenant]
            root = pinned.prompt[0]
            del self._by_root[root][pin]
            if not self._by_root[root]:
                del self._by_root[root]
        return pinned

    def matching(self, prompt: Sequence[K], now: float) -> Iterator[tuple[Pinned[K], int]]:
        """Yield valid pins that share a prefix with `prompt`, and its length in blocks."""
        same_root = self._by_root.get(prompt[0], {}) if prompt and self._by_root else {}
        for pin in list(same_root.values()):
            if pin.deadline > now:
                yield pin, common_prefix(prompt, pin.prompt)
            else:
                self.remove(pin.id)
