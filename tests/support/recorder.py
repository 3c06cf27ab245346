"""An engine's sink that records everything and tracks the blocks held according to the events."""

from array import array
from collections import Counter
from dataclasses import dataclass, field

from kvmesh.bus.messages import Cleared, KvEvent, Removed
from kvmesh.hashing import sequence_hashes
from kvmesh.worker.engine import EngineError, OutputDelta


@dataclass
class Recorder:
    """`held` are engine hashes by rank, `sequences` the mesh's hashes of all ranks.

    `below` are the hashes of each lower tier, of all ranks. `reasons` counts the blocks that the
    engine itself removed, by their reason and the request in need.
    """

    deltas: dict[str, list[OutputDelta]] = field(default_factory=dict)
    held: dict[int, set[int]] = field(default_factory=dict)
    below: dict[int, set[int]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    removed: int = 0
    clears: int = 0
    reasons: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    lost_events: int = 0
    errors: list[EngineError] = field(default_factory=list)
    _names: dict[int, int] = field(default_factory=dict)

    def output(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            if delta.request not in self.deltas:
                self.order.append(delta.request)
            self.deltas.setdefault(delta.request, []).append(delta)

    def events(self, rank: int, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.clears += 1
                self.held[rank] = set()
                self.below.clear()
                continue
            tiers, key = (self.below, event.tier) if event.tier else (self.held, rank)
            held = tiers.setdefault(key, set())
            if isinstance(event, Removed):
                gone = set(array("Q", event.engine))
                self.removed += len(gone)
                if not event.tier:
                    self.reasons[event.reason, event.request] += len(gone)
                assert gone <= held
                held -= gone
            else:
                assert event.parent is None or self._holds(event.parent)
                before = event.salt if event.parent is None else self._names[event.parent]
                before = before if event.previous is None else event.previous
                engine = array("Q", event.engine)
                sequences = array("Q", sequence_hashes(event.local, before))
                self._names.update(zip(engine, sequences, strict=True))
                held |= set(engine)

    def _holds(self, name: int) -> bool:
        return any(name in held for held in (*self.held.values(), *self.below.values()))

    def events_lost(self, rank: int, count: int) -> None:
        self.lost_events += count

    def failed(self, error: EngineError) -> None:
        self.errors.append(error)

    @property
    def sequences(self) -> set[int]:
        return {self._names[name] for held in self.held.values() for name in held}

    def sequences_below(self, tier: int) -> set[int]:
        """The mesh's hashes of the blocks in a lower tier."""
        return {self._names[name] for name in self.below.get(tier, ())}

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas.get(name, []) for token in delta.tokens]

    def finish(self, name: str) -> str | None:
        return self.deltas[name][-1].finish if self.deltas.get(name) else None

    def tiers(self, name: str) -> list[int]:
        """Cached prompt tokens, by tier, as told last."""
        return [d.cached for d in self.deltas[name] if d.cached is not None][-1]

    def cached(self, name: str) -> int:
        return sum(self.tiers(name))
