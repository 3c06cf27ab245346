"""The mock engine's side of the tiers of its node."""

from typing import Protocol

from kvmesh.bus.messages import Retain
from kvmesh.worker.enginecore.sequence import Sequence


class NodeTiers(Protocol):
    """The kvbm of a node, as the core of an engine uses it."""

    @property
    def available(self) -> bool:
        """True if sequences wait for blocks from there, until `Scheduler.end_loading`."""
        ...

    @property
    def load_ratio(self) -> float:
        """The time to load a block from there over the time to compute it; 0 if unknown."""
        ...

    def on_filled(self, sequence: Sequence) -> None:
        """Called when blocks of a sequence are full by the end of the step in progress."""
        ...

    def on_prompt(self, sequence: Sequence) -> None:
        """Called when the prompt of a sequence is computed by the end of the step in progress."""
        ...


def retained(sequence: Sequence) -> list[Retain]:
    """The retention that a request asks for, in tokens."""
    claims, size = sequence.request.retention, sequence.block_size
    return [
        Retain(
            segment.first * size,
            None if segment.end is None else segment.end * size,
            segment.wish.level,
            segment.wish.ttl_s,
        )
        for segment in (claims.segments if claims is not None else ())
    ]
