"""Conditions of a simulated fan-out of weights."""

from dataclasses import dataclass, field
from typing import Literal

from kvmesh.simulator.options import SimulationError
from kvmesh.weights.stream import FetchOptions

Fault = Literal["killed", "frozen", "slow", "lying"]
FAULTS: tuple[Fault, ...] = ("killed", "frozen", "slow", "lying")
SLOW_FACTOR = 20.0


@dataclass(frozen=True)
class FanoutOptions:
    """Rates are in bytes/s, of each direction of each worker's link; times in seconds.

    `targets` start `wave_s` apart in waves of `wave` (0: all at once), beside `seeds` workers that
    have all chunks. Each knows up to `sample` others, drawn at random `discovery_s` after its
    start, and more every `refresh_s` while it has fewer. A source sends `slots` chunks at once,
    lets `queue` more requests wait and refuses the others. `faults` strike random workers but not
    the first seed, by shares of all, at random times within `fault_within` of one transfer's time.
    `central_bytes_per_s` is the central store's rate.
    """

    targets: int = 8
    seeds: int = 1
    size: int = 16_000_000_000
    chunk_bytes: int = 8 << 20
    link_bytes_per_s: float = 1.25e9
    latency_s: float = 0.0002
    discovery_s: float = 0.15
    refresh_s: float = 2.0
    sample: int = FetchOptions.known
    slots: int = 4
    queue: int = 4
    wave: int = 0
    wave_s: float = 0.0
    faults: dict[Fault, float] = field(default_factory=dict)
    fault_within: float = 1.0
    central_bytes_per_s: float = 5e9
    fetch: FetchOptions = field(default_factory=FetchOptions)
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.targets, self.seeds, self.size, self.chunk_bytes, self.sample, self.slots)
        if min(counts) < 1 or self.wave < 0:
            raise SimulationError("targets, seeds, sizes, sample and slots must be at least 1")
        if min(self.link_bytes_per_s, self.central_bytes_per_s, self.refresh_s) <= 0:
            raise SimulationError("rates must be above 0")
        if min(self.latency_s, self.discovery_s, self.wave_s, self.fault_within) < 0:
            raise SimulationError("times must be at least 0")
        if not 0 <= sum(self.faults.values()) <= 1 or min(self.faults.values(), default=0) < 0:
            raise SimulationError("shares of faults must be at least 0, together at most 1")

    @property
    def sizes(self) -> list[int]:
        """Bytes of each chunk."""
        whole, rest = divmod(self.size, self.chunk_bytes)
        return [self.chunk_bytes] * whole + [rest] * (rest > 0)

    @property
    def transfer_s(self) -> float:
        """Time of one copy over one link."""
        return self.size / self.link_bytes_per_s

    def start_of(self, target: int) -> float:
        """The time at which a target starts."""
        return target // self.wave * self.wave_s if self.wave else 0.0
