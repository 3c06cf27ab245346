"""The interface of learners: each reports what it gained over its fallback. Pure."""

from collections.abc import Iterable
from typing import Protocol

from kvmesh.bus.messages import LearnerReport


class Learner(Protocol):
    """Decides better than a fallback by what it has observed, or steps back to the fallback.

    It judges itself on requests that it has not learned from yet, beside its fallback on the same
    requests or on others of the same kind.
    """

    def report(self, model: str) -> Iterable[LearnerReport]:
        """The gain and state for a model; empty for one that it knows nothing about."""
        ...
