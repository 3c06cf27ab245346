"""The sequences that wait for a worker of an idle model, and the wakes due for them."""

from dataclasses import dataclass, field

from kvmesh.bus.messages import Wake
from kvmesh.frontend.errors import Overloaded

INTERVAL_S = 1.0  # between two wakes of one model, at least
REPEAT_S = 3.0  # a planner that restarts learns of the waiting sequences within this time


@dataclass
class _Model:
    """Prompt tokens by sequence, oldest first; `changed` since the last wake, at `posted_at`."""

    posted_at: float
    tokens: dict[str, int] = field(default_factory=dict)
    changed: bool = True

    def due(self, now: float) -> bool:
        since = now - self.posted_at
        return bool(self.tokens) and since >= (INTERVAL_S if self.changed else REPEAT_S)


class WaitingSequences:
    """At most `limit` waiting sequences of all idle models in one frontend.

    Times are on the loop's clock.
    """

    def __init__(self, frontend: str, limit: int) -> None:
        self._frontend = frontend
        self._limit = limit
        self._models: dict[str, _Model] = {}

    def counts(self) -> dict[str, int]:
        """The number of waiting sequences of each model that had some recently."""
        return {name: len(model.tokens) for name, model in self._models.items()}

    def add(self, model: str, sequence: str, tokens: int, now: float) -> None:
        """Count a sequence with a prompt of `tokens` tokens; raises Overloaded at the limit."""
        if sum(self.counts().values()) >= self._limit:
            raise Overloaded(f"Too many requests wait for a worker of `{model}`.")
        entry = self._models.setdefault(model, _Model(now - INTERVAL_S))
        entry.tokens[sequence] = tokens
        entry.changed = True

    def remove(self, model: str, sequence: str) -> None:
        """Uncount a sequence, which waits no more."""
        self._models[model].tokens.pop(sequence, None)

    def due(self, now: float, time: float) -> list[Wake]:
        """The wakes to post now; `time` is the Unix time. Forgets models without waiting sequences.

        Each model has one at most every INTERVAL_S, and one every REPEAT_S while sequences wait.
        """
        wakes = []
        for name, model in list(self._models.items()):
            if model.due(now):
                model.posted_at, model.changed = now, False
                wakes.append(self._wake(name, model.tokens, time))
            elif not model.tokens and now - model.posted_at >= INTERVAL_S:
                del self._models[name]
        return wakes

    def _wake(self, model: str, tokens: dict[str, int], time: float) -> Wake:
        return Wake(
            model=model,
            frontend=self._frontend,
            request=next(iter(tokens)),
            waiting=len(tokens),
            tokens=sum(tokens.values()),
            time=time,
        )
