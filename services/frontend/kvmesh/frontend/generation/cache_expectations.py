"""Whether what routers expect to be cached is what engines then find."""

from collections.abc import Collection
from dataclasses import dataclass

MEMORY = 0.97  # what the requests before are worth after one more
ENOUGH = 30
WRONG = 0.5
RIGHT = 0.7


@dataclass
class Record:
    """Tokens expected and found on one worker, decayed; requests are counted as they come."""

    worker: str
    requests: int = 0
    expected: float = 0.0
    found: float = 0.0
    wrong: bool = False

    def note(self, expected: int, found: int) -> None:
        self.requests += 1
        self.expected = self.expected * MEMORY + expected
        self.found = self.found * MEMORY + min(found, expected)
        share = self.found / self.expected
        if self.requests >= ENOUGH:
            self.wrong = share < (RIGHT if self.wrong else WRONG)


class CacheExpectations:
    """Of each worker, over its last requests of which something was expected."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def note(self, instance: str, expected: int, found: int) -> None:
        """A request ended: prompt tokens expected in the cache of a worker, and found there."""
        if expected > 0:
            worker = instance.rpartition("-")[0]
            self._records.setdefault(instance, Record(worker)).note(expected, found)

    def keep(self, instances: Collection[str]) -> None:
        """Only these are there."""
        for instance in self._records.keys() - instances:
            del self._records[instance]

    def wrong(self) -> dict[str, str]:
        """The workers whose engines find less than half of it, each with a line for the log."""
        return {
            instance: (
                f"{record.worker} finds less than half of the cached tokens that routers expect"
                " there: the index or the predictions are wrong about it"
            )
            for instance, record in self._records.items()
            if record.wrong
        }
