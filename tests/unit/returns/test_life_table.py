"""Life tables: the native ones beside plain Python, number for number."""

from random import Random

from kvmesh._native import LifeTable, grow_older, learned_rates, start_all
from kvmesh.returns.rates import AGE_ENDS, BINS, age_bin
from kvmesh.returns.value import BIN_WIDTHS

PRIOR_PROMPTS, COARSE_RETURNS = 20.0, 2.0


class PlainTable:
    """Evidence of one class."""

    def __init__(self, now: float) -> None:
        self.returns, self.seconds = [0.0] * BINS, [0.0] * BINS
        self.waiting, self.at = [0] * BINS, [now] * BINS
        self.prompts = self.returned = self.expected = 0.0

    def pass_time(self, at: int, now: float) -> None:
        passed = now - self.at[at]
        if passed > 0:
            kept = 0.5 ** (passed / LifeTable.HALF_LIFE_S)
            self.at[at] = now
            self.returns[at] *= kept
            self.seconds[at] = self.seconds[at] * kept + self.waiting[at] * passed
            if not at:
                self.prompts *= kept
                self.returned *= kept
                self.expected *= kept

    def move(self, at: int, count: int, now: float) -> None:
        self.pass_time(at, now)
        self.waiting[at] += count

    def count_return(self, age_s: float, until_s: float) -> None:
        for at in range(age_bin(age_s), age_bin(until_s) + 1):
            start = max(age_s, AGE_ENDS[at - 1] if at else 0.0)
            late_s = max(min(until_s, AGE_ENDS[at]) - start, 0.0)
            self.seconds[at] = max(self.seconds[at] - late_s, 0.0)
        self.returns[age_bin(age_s)] += 1.0
        self.returned += 1.0

    def own_rates(self, now: float) -> list[float]:
        rates, belief = [], 1.0 / AGE_ENDS[0]
        for at in range(BINS):
            self.pass_time(at, now)
            prior_s = PRIOR_PROMPTS * min(BIN_WIDTHS[at], AGE_ENDS[-2])
            rates.append((self.returns[at] + belief * prior_s) / (self.seconds[at] + prior_s))
            belief = rates[-1] / 2
        return rates

    def refine(self, coarse: list[float], now: float) -> list[float]:
        for at in range(BINS):
            self.pass_time(at, now)
        evidence = zip(self.returns, self.seconds, coarse, strict=True)
        return [(r + COARSE_RETURNS) / (s + COARSE_RETURNS / rate) for r, s, rate in evidence]


def test_native_tables_have_the_rates_of_plain_ones() -> None:
    rng, now = Random(4), 0.0
    tables = [LifeTable(now), LifeTable(now)]
    plain = [PlainTable(now), PlainTable(now)]
    waiting: list[tuple[float, int]] = []
    for _ in range(2000):
        now += rng.expovariate(0.1)
        if not waiting or rng.random() < 0.4:
            some, expected = slice(rng.randrange(2), None), rng.random()
            start_all(tables[some], now, expected)
            for each in plain[some]:
                each.move(0, 1, now)
                each.prompts, each.expected = each.prompts + 1.0, each.expected + expected
            waiting.append((now, 0))
            continue
        since, at = waiting.pop(rng.randrange(len(waiting)))
        if at < BINS - 1 and rng.random() < 0.6:
            grow_older(tables, at, now)
            for each in plain:
                each.move(at, -1, now)
                each.move(at + 1, 1, now)
            waiting.append((since, at + 1))
        else:
            age_s = rng.uniform(0.0, now - since)
            for table, each in zip(tables, plain, strict=True):
                table.leave(at, now)
                table.count_return(age_s, now - since)
                each.move(at, -1, now)
                each.count_return(age_s, now - since)
    assert learned_rates(tables, now) == plain[1].refine(plain[0].own_rates(now), now)
    for table, each in zip(tables, plain, strict=True):
        counts = each.prompts, each.returned, each.expected
        assert (table.prompts, table.returned, table.expected) == counts


def test_a_closed_table_counts_for_nothing() -> None:
    coarse, fine = LifeTable(0.0), LifeTable(0.0)
    start_all([coarse, fine], 0.0, 0.5)
    fine.close()
    fine.count_return(1.0, 2.0)
    assert learned_rates([coarse, fine], 9.0) == learned_rates([coarse], 9.0)
    assert learned_rates([fine], 9.0) == learned_rates([], 9.0)
