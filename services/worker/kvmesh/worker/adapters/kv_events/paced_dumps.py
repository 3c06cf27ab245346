"""Dumps of a rank's blocks after lost KV events, limited in rate."""

import asyncio
from collections.abc import Callable

DUMP_EVERY_S = 5.0  # at most


class PacedDumps:
    """Has `publish` send all blocks of a rank, at most once in DUMP_EVERY_S for losses."""

    def __init__(self, publish: Callable[[], None]) -> None:
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._made_at = -DUMP_EVERY_S
        self._due: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """Events are lost: dump at once, or when the next dump is due."""
        due_at = self._made_at + DUMP_EVERY_S
        if due_at <= self._loop.time():
            self.make()
        elif self._due is None:
            self._due = self._loop.call_at(due_at, self.make)

    def make(self) -> None:
        """Dump now; it serves for a later one that is due."""
        self.close()
        self._made_at = self._loop.time()
        self._publish()

    def close(self) -> None:
        """Make no dump that is due."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
