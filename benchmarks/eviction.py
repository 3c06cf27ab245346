"""CPU time of eviction in the engines' block manager: by recency, and by forecasts of return.

Sessions of 16 to 256 blocks share a system prompt of 32 blocks and fill a rank. Then new sessions
arrive, one after another: each allocates its blocks, for which others are evicted, and ends. With
forecasts every ended prompt gets one; the clock passes many bins of age, so that each value changes
often.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from common import Report, median, parser

from kvmesh.bus.messages import ReturnForecast
from kvmesh.cli.commands.version import cores
from kvmesh.returns.rates import BINS, pack_rates
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.retention_options import RetentionOptions

SHARED = 32
KINDS = 50


@dataclass
class Cost:
    """CPU seconds in all, in evictions of blocks and in forecasts, and the numbers of each."""

    all_s: float = 0.0
    evict_s: float = 0.0
    evicted: int = 0
    calls: int = 0
    forecast_s: float = 0.0
    sessions: int = 0


class Sessions:
    """A rank of `capacity` blocks on which sessions come and go; `second` passes between two."""

    def __init__(self, capacity: int, forecasts: bool, second: float, seed: int = 0) -> None:
        self.manager = BlockManager(capacity, RetentionOptions(by_forecast=forecasts))
        self._second = second
        self._forecasts = forecasts
        self._rng = Random(seed)
        self._system = array("Q", range(1, SHARED + 1))
        self._next = SHARED + 1
        self._count = 0
        starts = [self._rng.uniform(-12, 0) for _ in range(KINDS)]
        self._rates = [pack_rates([2.0 ** (s - k / 2) for k in range(BINS)]) for s in starts]

    def run(self, sessions: int) -> Cost:
        cost = Cost()
        start = time.process_time()
        for _ in range(sessions):
            self._session(cost)
        cost.all_s = time.process_time() - start
        cost.sessions = sessions
        return cost

    def _session(self, cost: Cost) -> None:
        manager, new = self.manager, self._rng.randrange(16, 257)
        manager.now += self._second
        self._count += 1
        blocks = self._system + array("Q", range(self._next, self._next + new))
        self._next += new
        held = manager.lock_prefix(blocks)
        short = manager.active + manager.cached + len(blocks) - held - manager.capacity
        if short > 0:
            start = time.process_time()
            manager.retention.evict(short, manager.now)
            cost.evict_s += time.process_time() - start
            cost.evicted += short
            cost.calls += 1
        manager.allocate(len(blocks) - held)
        manager.promote(blocks[held - 1] if held else None, 0, blocks[held:], blocks[held:])
        request = f"r-{self._count}"
        manager.retention.end_request(request, None, blocks, manager.now)
        manager.unlock(blocks)
        manager.take_events()
        if self._forecasts:
            start = time.process_time()
            rates = self._rates[self._count % KINDS]
            forecast = ReturnForecast(request, 0, manager.now, rates)
            manager.retention.expect_returns([forecast], manager.now)
            cost.forecast_s += time.process_time() - start


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--blocks", type=int, default=200_000, help="of the rank (200,000)")
    arguments.add_argument("--sessions", type=int, default=4_000, help="timed in a run (4,000)")
    arguments.add_argument("--second", type=float, default=0.5, help="between two sessions (0.5)")
    arguments.add_argument("--runs", type=int, default=5)
    given = arguments.parse_args()
    subjects = [Sessions(given.blocks, forecasts, given.second) for forecasts in (False, True)]
    costs: list[list[Cost]] = [[], []]
    for subject in subjects:
        subject.run(2 * given.blocks // 136)
    for _ in range(given.runs):
        for subject, found in zip(subjects, costs, strict=True):
            found.append(subject.run(given.sessions))
    recency, forecast = costs
    report = Report(f"Eviction, {given.blocks:,} blocks (cores {cores()})", "by recency")

    def row(name: str, value: Callable[[Cost], float], target: str = "") -> tuple[float, float]:
        runs, base = [[1e6 * value(cost) for cost in found] for found in (forecast, recency)]
        report.add_runs(name, runs, "CPU us", f"{median(base):.3g}", target)
        return median(runs), median(base)

    row("eviction for one session", lambda c: c.evict_s / c.calls)
    now, _ = row("… per evicted block", lambda c: c.evict_s / c.evicted, "< 10")
    row("forecast of one session", lambda c: c.forecast_s / c.sessions)
    row("session, from the first block to the forecast", lambda c: c.all_s / c.sessions)
    report.finish(
        f"eviction by forecasts takes {now:.2f} us per block, by recency"
        f" {median(1e6 * c.evict_s / c.evicted for c in recency):.2f}",
        given.json,
    )


if __name__ == "__main__":
    main()
