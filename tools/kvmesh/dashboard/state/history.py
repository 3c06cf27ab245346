"""Sums over the workers, once a second, for charts. Pure."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvmesh.observer.fleet import FleetRow

SAMPLES = 300


class FleetSample(NamedTuple):
    """Sums at the Unix time `time`; rates in tokens per second, shares of KV blocks from 0 to 1."""

    time: float
    workers: int
    running: int
    waiting: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    kv_used: float
    kv_cached: float


class FleetHistory:
    """The last SAMPLES samples."""

    def __init__(self) -> None:
        self.samples: deque[FleetSample] = deque(maxlen=SAMPLES)

    def add(self, time: float, rows: Iterable[FleetRow]) -> None:
        """Add the sums over the rows that have loads."""
        loaded = [row for row in rows if row.running is not None]
        count = max(len(loaded), 1)
        self.samples.append(
            FleetSample(
                time,
                len(loaded),
                sum(row.running or 0 for row in loaded),
                sum(row.waiting or 0 for row in loaded),
                sum(row.prompt_tokens_per_s or 0.0 for row in loaded),
                sum(row.output_tokens_per_s or 0.0 for row in loaded),
                sum(row.kv_used or 0.0 for row in loaded) / count,
                sum(row.kv_cached or 0.0 for row in loaded) / count,
            )
        )
