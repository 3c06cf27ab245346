"""Comparison of the cached tokens that routers expect with those that engines serve."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvmesh.placement_rules.served import ServedTokens

DECAY = 0.97  # of earlier requests, at each request
MIN_REQUESTS = 30
WRONG_BELOW = 0.5
RIGHT_ABOVE = 0.7


@dataclass
class Record:
    """Decayed sums of tokens expected and found on one worker; `wrong` has hysteresis.

    `total` has those of all requests.
    """

    worker: str
    model: str = ""
    requests: int = 0
    expected: float = 0.0
    found: float = 0.0
    wrong: bool = False
    total: ServedTokens = field(default_factory=ServedTokens)

    def add(self, expected: int, found: int) -> None:
        self.requests += 1
        self.expected = self.expected * DECAY + expected
        self.found = self.found * DECAY + min(found, expected)
        share = self.found / self.expected
        if self.requests >= MIN_REQUESTS:
            self.wrong = share < (RIGHT_ABOVE if self.wrong else WRONG_BELOW)


class CacheExpectations:
    """A record for each worker."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def add(
        self,
        model: str,
        instance: str,
        expected: int,
        announced: Sequence[int],
        found: Sequence[int],
    ) -> None:
        """A request on `instance` has ended, of which `expected` prompt tokens were to be cached.

        `announced` are those of them that the index knew, `found` those that the engine served,
        by tier.
        """
        record = self._records.get(instance)
        if record is None:
            record = self._records[instance] = Record(instance.rpartition("-")[0], model)
        record.total.add(announced, found)
        if expected > 0:
            record.add(expected, sum(found))

    def totals(self) -> Iterator[tuple[str, str, ServedTokens]]:
        """The model, the worker and its tokens, of each worker."""
        for record in self._records.values():
            yield record.model, record.worker, record.total

    def retain(self, instances: Collection[str]) -> None:
        """Drop the records of all other instances."""
        for instance in self._records.keys() - instances:
            del self._records[instance]

    def wrong(self) -> dict[str, str]:
        """A warning for each worker whose engine finds less than half of the expected tokens."""
        return {
            instance: (
                f"{record.worker} finds less than half of the cached tokens that routers expect"
                " there: the index or the predictions are wrong about it"
            )
            for instance, record in self._records.items()
            if record.wrong
        }
