"""Memory per cache hit: plain times to live, plain LRU, and LRU with hints about ended sessions.

Coding agents (the shipped profile) are replayed against one cache; rounds take a nominal time, so
that every policy meets the same requests at the same instants. Blocks in use must be in memory
whatever the policy; the measure is the number of other, idle blocks. A time to live keeps each
block for that long after its last use. The engines' own block manager gets capacity for the fewest
idle blocks that reach the same hits: without hints, and with hints about sessions, their ends,
rewritten tails and dropped thinking. Idle blocks that are used again are the minimum, which even a
policy that knows the length of each wait cannot avoid.

Last, the block manager gets the same capacity with and without forecasts of returns: the rates of
all waits, those of waits below and above a minute, and those of the bin of age of each wait. The
forecasts are of hindsight; a router has to learn them.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import msgspec
import numpy as np
from common import Report, parser
from numpy.typing import NDArray

from kvmesh.bus.messages import ReturnForecast
from kvmesh.retention.claims import THINKING_LEVEL, RetentionWish
from kvmesh.retention.token_ranges import RetentionSegment
from kvmesh.returns.rates import AGE_ENDS, BINS, age_bin, pack_rates
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.retention_options import RetentionOptions
from kvmesh.worker.enginecore.retention_request import RetentionRequest
from kvmesh.workload.generate.agents import REQUEST_S, TOKEN_S, AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.model import Round, Workload

BLOCK = 256
PER_MINUTE = 10.0
TIMES = {"1 min": 60.0, "5 min": 300.0, "1 h": 3600.0}
FIELD = {"1 min": ("85", "0.74"), "5 min": ("94", "1.9"), "1 h": ("98.6", "5.07")}
STEPS = 9
MINUTE_S = 60.0
LONGEST_S = 20_000.0
CAPACITIES = (0.5, 1.0, 2.0)
ENDLESS = 1 << 40


@dataclass(frozen=True)
class Use:
    """A round starts or ends at `at` seconds; `blocks` are those of its prompt and its answer."""

    at: float
    begins: bool
    index: int
    round: Round
    blocks: "array[int]"
    last: bool

    @property
    def prompt(self) -> int:
        return self.round.input_tokens // BLOCK

    @property
    def reusable(self) -> int:
        return (self.round.input_tokens - 1) // BLOCK


@dataclass(frozen=True)
class Held:
    """Blocks found in the cache in all, and idle blocks on average over time.

    `waited` are those of them that were used again.
    """

    hits: int
    idle: float
    waited: float = 0.0


def schedule(workload: Workload) -> list[Use]:
    """Every start and end in order, ends first if they coincide."""
    ends: list[float] = []
    uses: list[Use] = []
    last = {round_.session: index for index, round_ in enumerate(workload.rounds)}
    for index, round_ in enumerate(workload.rounds):
        start = max((ends[before] for before in round_.after), default=0.0) + round_.at_s
        ends.append(start + REQUEST_S + TOKEN_S * round_.output_tokens)
        total = round_.input_tokens + round_.output_tokens
        blocks = array("Q", workload.tree.blocks(round_.output_branch, total, BLOCK).tobytes())
        final = last[round_.session] == index
        for at, begins in ((start, True), (ends[-1], False)):
            uses.append(Use(at, begins, index, round_, blocks, final))
    return sorted(uses, key=lambda use: (use.at, use.begins, use.index))


class Timed:
    """Each block for `ttl` seconds after each use, in unbounded memory.

    `told`: blocks of a single session leave once no later prompt extends them.
    """

    def __init__(self, uses: list[Use], ttl: float, told: bool = False) -> None:
        self._uses = uses
        self._ttl = ttl
        self._told = told
        self._ids, count = _numbered(uses)
        self._users = np.zeros(count, np.int64)
        self._left = np.full(count, -inf)
        self._shared = _shared(uses, self._ids, count)
        self._latest: dict[int, NDArray[np.int64]] = {}
        self._idle = 0.0

    def run(self) -> Held:
        hits, waited = 0, 0.0
        for use in self._uses:
            mine = self._ids[use.index]
            if not use.begins:
                self._end(use, mine)
                continue
            if self._told:
                latest = self._latest.pop(use.round.session, mine)
                self._forget(np.setdiff1d(latest, mine), use.at)
            gap = self._use(mine[: use.prompt], use.at)
            gone = np.flatnonzero(gap[: use.reusable] > self._ttl)
            hits += int(gone[0]) if len(gone) else use.reusable
            waited += float(gap[gap <= self._ttl].sum())
        end = self._uses[-1].at
        self._drop(np.arange(len(self._left)), end)
        return Held(hits, self._idle / end, waited / end)

    def _use(self, mine: NDArray[np.int64], at: float) -> NDArray[np.float64]:
        """Start to use blocks; returns how long each of them was idle."""
        gap = np.where(self._users[mine] > 0, 0.0, at - self._left[mine])
        self._idle += float(np.minimum(gap[np.isfinite(gap)], self._ttl).sum())
        self._users[mine] += 1
        return gap

    def _end(self, use: Use, mine: NDArray[np.int64]) -> None:
        self._users[mine[: use.prompt]] -= 1
        self._left[mine[self._users[mine] == 0]] = use.at
        if self._told:
            thinking = use.round.output_branch != use.round.branch
            kept = 0 if use.last else use.prompt if thinking else len(mine)
            self._forget(mine[kept:], use.at)
            self._latest[use.round.session] = mine

    def _forget(self, blocks: NDArray[np.int64], at: float) -> None:
        """A session releases blocks: those of this session alone leave."""
        self._drop(blocks[~self._shared[blocks]], at)

    def _drop(self, blocks: NDArray[np.int64], at: float) -> None:
        idle = blocks[self._users[blocks] == 0]
        kept = at - self._left[idle]
        self._idle += float(np.minimum(kept[np.isfinite(kept)], self._ttl).sum())
        self._left[idle] = -inf


def _shared(uses: list[Use], ids: list[NDArray[np.int64]], count: int) -> NDArray[np.bool_]:
    """Blocks that several sessions use."""
    owner = np.full(count, -1)
    shared = np.zeros(count, np.bool_)
    for use in uses:
        mine = ids[use.index]
        shared[mine] |= (owner[mine] >= 0) & (owner[mine] != use.round.session)
        owner[mine] = use.round.session
    return shared


def in_use(uses: list[Use]) -> float:
    """Blocks of the running prompts, on average over time."""
    ids, count = _numbered(uses)
    users, active, before, sum_ = np.zeros(count, np.int64), 0, 0.0, 0.0
    for use in uses:
        sum_ += active * (use.at - before)
        before, mine = use.at, ids[use.index][: use.prompt]
        if use.begins:
            active += int((users[mine] == 0).sum())
        users[mine] += 1 if use.begins else -1
        if not use.begins:
            active -= int((users[mine] == 0).sum())
    return sum_ / before


def _numbered(uses: list[Use]) -> tuple[list[NDArray[np.int64]], int]:
    """The blocks of each round as small integers, and the number of different blocks."""
    rounds = {use.index: use.blocks for use in uses}
    parts = [np.frombuffer(rounds[index], np.uint64) for index in sorted(rounds)]
    _, numbers = np.unique(np.concatenate(parts), return_inverse=True)
    return np.split(numbers, np.cumsum([len(p) for p in parts])[:-1]), int(numbers.max()) + 1


class Managed:
    """The engines' block manager under the same uses, with at most `most` idle blocks.

    `told`: it receives sessions and kinds. `forecast` returns packed rates of return at the end of
    a round.
    """

    def __init__(
        self, most: int, told: bool, forecast: Callable[[Use], bytes] | None = None
    ) -> None:
        self._forecast = forecast
        self.blocks = BlockManager(ENDLESS, RetentionOptions(session_idle_s=inf))
        self._most = most
        self._told = told

    def on_use(self, use: Use) -> None:
        """Called after each use, before evictions."""

    def run(self, uses: list[Use]) -> Held:
        blocks, before = self.blocks, 0.0
        hits, idle = 0, 0.0
        for use in uses:
            idle += blocks.cached * (use.at - before)
            before = blocks.now = use.at
            found = blocks.lock_prefix(use.blocks[: use.prompt]) if use.begins else use.prompt
            hits += min(found, use.reusable) if use.begins else 0
            self._fill(use, found)
            if not use.begins:
                self._end(use)
            elif self._told:
                blocks.retention.start_request(
                    use.blocks[: use.prompt], use.blocks, _asked(use), use.at
                )
            self.on_use(use)
            if blocks.cached > self._most:
                blocks.retention.evict(blocks.cached - self._most, use.at)
            blocks.take_events()
        return Held(hits, idle / before)

    def _fill(self, use: Use, first: int) -> None:
        new = use.blocks[first : use.prompt if use.begins else None]
        self.blocks.allocate(len(new))
        self.blocks.promote(use.blocks[first - 1] if first else None, 0, new, new)

    def _end(self, use: Use) -> None:
        keeping = self.blocks.retention
        if self._told:
            keeping.finish_request(use.blocks, _asked(use), use.at, use.prompt)
        request = str(use.index)
        keeping.end_request(request, str(use.round.session), use.blocks, use.at)
        self.blocks.unlock(use.blocks)
        if self._forecast is not None:
            rates = self._forecast(use)
            forecast = ReturnForecast(request, 0, use.at, rates)
            keeping.expect_returns([forecast], use.at)
        if self._told and use.last:
            keeping.release([str(use.round.session)])


def _asked(use: Use) -> RetentionRequest:
    """An answer that no later prompt contains was thinking, or is forgotten for another reason."""
    dropped = use.round.output_branch != use.round.branch
    thinking = (
        [RetentionSegment(use.prompt, None, RetentionWish(THINKING_LEVEL))] if dropped else []
    )
    session = str(use.round.session)
    return RetentionRequest(
        segments=thinking, directives=[], prompt_directives=0, tenant="", session=session
    )


def least(uses: list[Use], hits: int, told: bool) -> tuple[int, Held]:
    """The fewest idle blocks with which the block manager has the same hits, and its contents."""
    return fewest(uses, hits, lambda most: Managed(most, told))


def fewest(uses: list[Use], hits: int, managed: Callable[[int], Managed]) -> tuple[int, Held]:
    """The same for block managers with a number of idle blocks."""
    low, high = 1, len({block for use in uses for block in use.blocks})
    found = (high, managed(high).run(uses))
    for _ in range(STEPS):
        middle = int((low * high) ** 0.5)
        held = managed(middle).run(uses)
        if held.hits >= hits:
            high, found = middle, (middle, held)
        else:
            low = middle
    return found


def rows(report: Report, uses: list[Use]) -> Iterator[tuple[float, float, float]]:
    """Adds the rows of each time to live.

    Yields percentages of its idle blocks: those of the block manager with hints, of LRU with hints,
    and of a policy that knows each wait.
    """
    ideal, active = Timed(uses, inf).run().hits, in_use(uses)
    report.add("blocks of the running prompts", active, "blocks")
    for name, seconds in TIMES.items():
        ttl = Timed(uses, seconds).run()
        most, silent = least(uses, ttl.hits, told=False)
        fewer, told = least(uses, ttl.hits, told=True)
        short = Timed(uses, seconds, told=True).run()
        shares = [100 * idle / ttl.idle for idle in (short.idle, told.idle, ttl.waited)]
        report.add(f"{name}: hits", 100 * ttl.hits / ideal, "% of ideal", FIELD[name][0])
        report.add(f"{name}: idle blocks", ttl.idle / active, "× those", FIELD[name][1])
        report.add(f"{name}, with ends of sessions", shares[0], "% of these", "", "≤ 60")
        report.add(f"{name}, LRU, same hits", 100 * silent.idle / ttl.idle, "% of these")
        report.add(f"{name}, LRU with hints, same hits", shares[1], "% of these", "", "≤ 60")
        report.add(f"{name}, LRU with hints, same hits: capacity", 100 * fewer / most, "% of LRU's")
        report.add(f"{name}, all waits known", shares[2], "% of these")
        yield shares[0], shares[1], shares[2]


class Hindsight:
    """Forecasts from the waits that follow, in seconds by round; a last round has none."""

    def __init__(self, uses: list[Use]) -> None:
        ends = {use.index: use.at for use in uses if not use.begins}
        self._waits: dict[int, float] = {}
        for use in uses:
            if use.begins:
                for before in use.round.after:
                    wait = use.at - ends[before]
                    self._waits[before] = min(wait, self._waits.get(before, inf))
        waits = [self._waits.get(index, inf) for index in ends]
        self._all = life_table(waits)
        self._short = life_table([wait for wait in waits if wait < MINUTE_S])
        self._long = life_table([wait for wait in waits if wait >= MINUTE_S])

    def of_all(self, use: Use) -> bytes:
        return self._all

    def of_class(self, use: Use) -> bytes:
        return self._short if self._waits.get(use.index, inf) < MINUTE_S else self._long

    def of_bin(self, use: Use) -> bytes:
        rates = [0.0] * BINS
        wait = self._waits.get(use.index)
        if wait is not None:
            rates[age_bin(wait)] = 3.0 / max(wait, 0.5)
        return pack_rates(rates)


def life_table(waits: Sequence[float]) -> bytes:
    """Packed rates of return by age: returns over the seconds waited, in each bin."""
    rates, start = [], 0.0
    for end in AGE_ENDS:
        returns = sum(start <= wait < end for wait in waits)
        waited = sum(min(wait, end, LONGEST_S) - start for wait in waits if wait > start)
        rates.append(returns / waited if returns else 0.0)
        start = end
    return pack_rates(rates)


def forecast_rows(report: Report, uses: list[Use]) -> str:
    """Adds hits by forecasts at equal capacity; returns those in words."""
    ideal, active, hindsight = Timed(uses, inf).run().hits, in_use(uses), Hindsight(uses)
    told = []
    for share in CAPACITIES:
        most = int(share * active)
        runs = {
            "recency": Managed(most, True),
            "rates of all waits": Managed(most, True, hindsight.of_all),
            "rates of short and long waits": Managed(most, True, hindsight.of_class),
            "the bin of each wait": Managed(most, True, hindsight.of_bin),
        }
        hits = {name: 100 * run.run(uses).hits / ideal for name, run in runs.items()}
        recency = f"{hits['recency']:.1f} by recency"
        for name, value in hits.items():
            baseline = recency if name != "recency" else ""
            report.add(f"at most {share:g} × those idle: {name}", value, "% of ideal", baseline)
        told.append(
            " to ".join(f"{value:.1f}" for value in (min(hits.values()), max(hits.values())))
        )
    return f"hits with at most {CAPACITIES} × the blocks in use idle: {', '.join(told)} %"


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--sessions", type=int, default=200)
    arguments.add_argument("--per-minute", type=float, default=PER_MINUTE)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    profile = load_profile("coding-agents")
    profile = msgspec.structs.replace(profile, per_minute=given.per_minute)
    uses = schedule(AgentGenerator(profile, given.seed).workload(given.sessions))
    title = f"Memory per hit: {len(uses) // 2:,} rounds of coding agents, blocks of {BLOCK} tokens"
    report = Report(title, "baseline, in the field")
    short, lru, known = (
        ", ".join(f"{share:.0f}" for share in shares)
        for shares in zip(*rows(report, uses), strict=True)
    )
    hits = forecast_rows(report, uses)
    report.finish(
        f"{hits}; of the idle blocks of times to live of {', '.join(TIMES)}, the same need {short}"
        f" % if told what ended, and LRU for the same hits {lru} %; who knew how long each wait "
        f"will be would need {known} %: the rest is kept for waits that turn out too long",
        given.json,
    )


if __name__ == "__main__":
    main()
