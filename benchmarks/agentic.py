"""Policies of retention for agents: hits, waits and storage beside those of the field.

Each part runs one workload under plain LRU with the linear cost, as the field's routers place, and
with kvmesh's placement, times to live, the orders of eviction of published
systems, kvmesh with its defaults, and bounds: Bélády's order, which knows all returns, on the same
engines and on one pooled engine, and endless memory. All run in the simulator over the live cores,
in closed loop. Figures are medians over the seeds; "returning" are the requests that continue a
session.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
from agentic_runs import (
    AHEAD,
    BELADY,
    BELADY_POOLED,
    CONTINUUM,
    COST,
    ENDLESS,
    FILTERED,
    LINEAR,
    LONG,
    LRU,
    MORI,
    OURS,
    REPORTED,
    SHARED,
    SHORT,
    TOLD,
    Policy,
    Result,
    Scene,
    paced_agents,
    play,
)
from agentic_storage import idle_shares
from common import Report, parser
from quality_study import windows
from rich.console import Console
from rich.table import Table

from kvmesh.workload.formats.registry import load
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.model import Workload

QUICK, USUAL, FULL = (0,), (0, 1, 2), (0, 1, 2, 3, 4)
STEP, LEAST, MOST = 50_000, 9, 24
TRACE_ROUNDS = 3000
MOST_REST_S = 65.0  # the deadline with which a rest ends after 60 s
STORED_SESSIONS = 100
Make = Callable[[int], Workload]


@dataclass(frozen=True)
class Part:
    """A workload per seed in a scene, and the policies to compare on it.

    With `tight`, each seed's engines have the least memory with which LRU with the linear cost has
    90 % of the ideal hits.
    """

    key: str
    title: str
    make: Make
    scene: Scene
    policies: tuple[Policy, ...]
    tight: bool = False


@dataclass
class PartResults:
    """The results of a part: those of each policy over the seeds."""

    part: Part
    results: dict[str, list[Result]] = field(default_factory=dict)

    def median_of(self, policy: Policy, pick: Callable[[Result], float]) -> float:
        return median(pick(result) for result in self.results[policy.name])

    def ratio(self, policy: Policy, pick: Callable[[Result], float]) -> float:
        """The median over the seeds of a figure over that of LRU with the linear cost."""
        pairs = zip(self.results[policy.name], self.results[LINEAR.name], strict=True)
        return median(pick(own) / pick(base) for own, base in pairs)


def agents(profile: str, sessions: int, per_minute: float | None, seed: int) -> Workload:
    """A workload of a shipped profile; if it says nothing of ends, every session announces its."""
    drawn = load_profile(profile)
    silent = not any(agent.ends for agent in drawn.agents)
    members = [msgspec.structs.replace(a, ends=1.0) if silent else a for a in drawn.agents]
    rate = per_minute or drawn.per_minute
    drawn = msgspec.structs.replace(drawn, per_minute=rate, agents=members)
    return AgentGenerator(drawn, seed).workload(sessions)


def forgetful(seed: int) -> Workload:
    """Coding agents whose next prompts do not contain the thinking of their answers."""
    drawn = load_profile("coding-agents")
    members = [msgspec.structs.replace(a, ends=1.0, keep_thinking=False) for a in drawn.agents]
    drawn = msgspec.structs.replace(drawn, per_minute=30.0, agents=members)
    return AgentGenerator(drawn, seed).workload(45)


def paced(seed: int) -> Workload:
    return paced_agents(24, 30, seed)


def parts(trace: Path | None, seeds: tuple[int, ...]) -> Iterator[Part]:
    """All parts, in the order of the table."""
    coding = partial(agents, "coding-agents", 90, 60.0)
    short = Scene(LEAST * STEP, speed=4.0)
    bounds = (BELADY, BELADY_POOLED, ENDLESS)
    field_orders = (SHORT, LONG, CONTINUUM, MORI, COST)
    yield Part(
        "tight",
        "90 coding agents, 4 engines, the memory with which LRU has 90 % of the ideal hits",
        coding,
        short,
        (LINEAR, LRU, *field_orders, TOLD, OURS, *bounds),
        tight=True,
    )
    yield Part(
        "tier",
        "the same with host memory of twice the engine's",
        coding,
        replace(short, host=2),
        (LINEAR, LRU, FILTERED, CONTINUUM, MORI, COST, TOLD, OURS, SHARED, BELADY, BELADY_POOLED),
        tight=True,
    )
    yield Part(
        "many",
        "120 coding agents, 4 engines of 0.6M tokens: contexts of many times the memory",
        partial(agents, "coding-agents", 120, 120.0),
        Scene(600_000, speed=4.0),
        (LINEAR, LRU, COST, OURS, BELADY, ENDLESS),
    )
    yield Part(
        "waits",
        "the same, and no agent rests for more than 60 s",
        partial(agents, "coding-agents", 120, 120.0),
        Scene(600_000, speed=4.0, deadline_s=MOST_REST_S),
        (LINEAR, LRU, COST, OURS, BELADY, ENDLESS),
    )
    yield Part(
        "approvals",
        "60 supervised agents, 2 engines of 0.5M tokens",
        partial(agents, "approving-agents", 60, 30.0),
        Scene(500_000, (1.0, 1.0), speed=2.0),
        (LINEAR, LRU, LONG, CONTINUUM, MORI, COST, OURS, REPORTED, BELADY),
    )
    yield Part(
        "team",
        "12 agent teams, 4 engines of 1M tokens",
        partial(agents, "agent-team", 12, None),
        Scene(1_000_000),
        (LINEAR, LRU, OURS, BELADY),
    )
    yield Part(
        "alone",
        "150 unattended agents, 100 at a time, 4 engines of 0.5M tokens",
        partial(agents, "unattended-agents", 150, None),
        Scene(500_000),
        (LINEAR, LRU, MORI, OURS, BELADY),
    )
    yield Part(
        "thinking",
        "45 coding agents whose clients drop thinking, 2 engines of 1.5M tokens",
        forgetful,
        Scene(1_500_000, (1.0, 1.0), speed=4.0),
        (LINEAR, LRU, OURS, AHEAD),
    )
    pair = Scene(1_000_000, (1.0, 1.0))
    yield Part("paced", "24 paced sessions, 2 engines", paced, pair, (LINEAR, LRU, OURS))
    yield Part(
        "slow",
        "90 coding agents, one of 4 engines of 0.75M tokens 3 times slower",
        coding,
        Scene(750_000, (1.0, 1.0, 1.0, 1 / 3), speed=4.0),
        (LINEAR, LRU, OURS),
    )
    if trace is not None:
        found, _ = load(str(trace))
        drawn = dict(zip(seeds, windows(found, len(seeds), TRACE_ROUNDS), strict=True))
        scene = Scene(4_000_000, (1.0,) * 8, speed=8.0)
        yield Part(
            "trace", f"{trace.name}, 8 engines", drawn.__getitem__, scene, (LINEAR, LRU, OURS)
        )


def run(part: Part, seeds: tuple[int, ...], memories: dict[int, int]) -> PartResults:
    """Run all policies of a part; `memories` keeps the least memory of each seed."""
    found = PartResults(part)
    for seed in seeds:
        workload, scene = part.make(seed), part.scene
        if part.tight:
            if seed not in memories:
                memories[seed] = least_memory(workload, scene, seed)
            scene = replace(scene, memory=memories[seed])
        for policy in part.policies:
            print(f"{part.key}, seed {seed}: {policy.name}", file=sys.stderr, flush=True)
            found.results.setdefault(policy.name, []).append(play(workload, scene, policy, seed))
    return found


def least_memory(workload: Workload, scene: Scene, seed: int) -> int:
    """The least memory of an engine, in steps, with which LRU with the linear cost has 90 %."""
    low, high = LEAST - 1, MOST
    while high - low > 1:
        middle = (low + high) // 2
        sized = replace(scene, memory=middle * STEP, host=0)
        if play(workload, sized, LINEAR, seed).of_ideal >= 0.9:
            high = middle
        else:
            low = middle
    return high * STEP


def show(found: PartResults, console: Console) -> None:
    """Print the results of a part."""
    table = Table(title=found.part.title, title_justify="left")
    table.add_column("policy")
    for heading in (
        "cached\n%",
        "of ideal\n%",
        "TTFT p50\nreturning, s",
        "TTFT p95\nreturning, s",
        "p95 /\nlinear's",
        "latency\nmean, s",
        "output\ntokens/s",
        "read from\ntiers, GiB",
        "written to\ntiers, GiB",
        "ahead, not\nused, Mtok",
    ):
        table.add_column(heading, justify="right")
    for policy in found.part.policies:
        cells = [
            f"{found.median_of(policy, lambda r: 100 * r.cached):.1f}",
            f"{found.median_of(policy, lambda r: 100 * r.of_ideal):.2f}",
            f"{found.median_of(policy, lambda r: r.ttft_p50):.3f}",
            f"{found.median_of(policy, lambda r: r.ttft_p95):.2f}",
            f"{found.ratio(policy, lambda r: r.ttft_p95):.2f}",
            f"{found.median_of(policy, lambda r: r.latency):.2f}",
            f"{found.median_of(policy, lambda r: r.tokens_per_s):,.0f}",
            f"{found.median_of(policy, lambda r: r.gib_up):,.0f}",
            f"{found.median_of(policy, lambda r: r.gib_down):,.0f}",
            f"{found.median_of(policy, lambda r: r.wasted / 1e6):.2f}",
        ]
        table.add_row(policy.name, *cells)
    console.print(table)


def judge(report: Report, found: dict[str, PartResults]) -> None:
    """Add the figures that have a target."""
    for key, goal in (("tight", "≥ 97"), ("tier", "≥ 98.5")):
        if key in found:
            _compare(report, found[key], "of ideal", lambda r: 100 * r.of_ideal, "%", goal)
    if "tier" in found:
        shared = [100 * result.of_ideal for result in found["tier"].results[SHARED.name]]
        report.add_runs("tier, shared block manager: of ideal", shared, "%", "", "≥ 98.5")
        ratio = found["tier"].ratio(SHARED, lambda r: r.ttft_p95)
        report.add(
            "tier, shared block manager: TTFT p95 of returning turns",
            ratio,
            "× LRU's",
            "",
            "≤ 0.60",
        )
    for key in ("tight", "tier", "many", "approvals", "alone"):
        if key in found:
            rivals = _best(found[key], _p95)
            _over_base(report, found[key], "TTFT p95 of returning turns", _p95, rivals, "≤ 0.60")
    for key in ("many", "waits"):
        if key in found:
            bound = f"endless memory {found[key].ratio(ENDLESS, _rate):.2f}"
            goal = "≥ 1.25" if key == "waits" else ""
            _over_base(report, found[key], "output tokens/s", _rate, bound, goal)
    if "slow" in found:
        name = "TTFT p50 of returning turns"
        _over_base(report, found["slow"], name, lambda r: r.ttft_p50, "", "≤ 0.50")
    if "team" in found:
        _compare(
            report,
            found["team"],
            "teammates, of ideal",
            lambda r: 100 * r.by_kind["teammate"],
            "%",
            "≥ 98.5",
        )
    if "paced" in found:
        _compare(
            report, found["paced"], "busier engine", lambda r: 100 * max(r.by_worker), "%", "≤ 60"
        )
    if "thinking" in found:
        table = found["thinking"]
        for name, policy in (("", OURS), (", speculative prefill", AHEAD)):
            ratio = table.ratio(policy, lambda r: r.ttft_p50)
            report.add(f"thinking: TTFT p50 of returning turns{name}", ratio, "× LRU's")
        unused = [100 * r.wasted / max(r.ahead, 1) for r in table.results[AHEAD.name]]
        report.add_runs("thinking: tokens computed ahead and not used", unused, "%")
    for table in found.values():
        _over_base(report, table, "mean latency", lambda r: r.latency, "1", "≤ 1.03")


def _p95(result: Result) -> float:
    return result.ttft_p95


def _rate(result: Result) -> float:
    return result.tokens_per_s


def _over_base(
    report: Report,
    table: PartResults,
    name: str,
    pick: Callable[[Result], float],
    others: str,
    goal: str,
) -> None:
    ratio = table.ratio(OURS, pick)
    report.add(f"{table.part.key}: {name}", ratio, "× LRU's", others, goal)


def _compare(
    report: Report,
    table: PartResults,
    name: str,
    pick: Callable[[Result], float],
    unit: str,
    goal: str,
) -> None:
    own = [pick(result) for result in table.results[OURS.name]]
    base = table.median_of(LINEAR, pick)
    report.add_runs(f"{table.part.key}: {name}", own, unit, f"LRU {base:.4g}", goal)


def _best(table: PartResults, pick: Callable[[Result], float]) -> str:
    """The best of the field's orders, and Bélády's on the same engines."""
    rivals = [p for p in table.part.policies if p in (SHORT, LONG, CONTINUUM, MORI, COST, FILTERED)]
    best = min(rivals, key=lambda policy: table.ratio(policy, pick))
    bound = table.ratio(BELADY, pick)
    return f"{best.name} {table.ratio(best, pick):.2f}, Bélády {bound:.2f}"


def storage(report: Report, seeds: tuple[int, ...]) -> None:
    """Add the idle storage of each policy, as a percentage of a time to live's."""
    runs: dict[tuple[str, str, float], list[float]] = {}
    for seed in seeds:
        print(f"storage, seed {seed}", file=sys.stderr, flush=True)
        workload = agents("coding-agents", STORED_SESSIONS, 10.0, seed)
        for row in idle_shares(workload):
            runs.setdefault((row.ttl, row.policy, row.target), []).append(row.percent)
    for (ttl, policy, target), percents in runs.items():
        goal = f"≤ {target:g}" if policy == OURS.name else ""
        report.add_runs(f"idle storage, {policy}", percents, f"% of a TTL of {ttl}", "", goal)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="one seed instead of three")
    arguments.add_argument("--full", action="store_true", help="five seeds")
    arguments.add_argument("--only", metavar="A,B,…", help="some of the parts, or storage")
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="an open-loop trace as well")
    given = arguments.parse_args()
    seeds = FULL if given.full else QUICK if given.quick else USUAL
    console = Console(width=160)
    report = Report(f"Targets, medians of {len(seeds)} seeds", "the field")
    chosen = given.only.split(",") if given.only else None
    found: dict[str, PartResults] = {}
    memories: dict[int, int] = {}
    for part in parts(given.trace, seeds):
        if chosen is None or part.key in chosen:
            found[part.key] = run(part, seeds, memories)
            show(found[part.key], console)
    judge(report, found)
    if chosen is None or "storage" in chosen:
        storage(report, seeds[:1] if not given.full else seeds)
    report.finish(_summary(found), given.json)


def _summary(found: dict[str, PartResults]) -> str:
    shares = ", ".join(
        f"{key} {table.median_of(OURS, lambda r: 100 * r.of_ideal):.1f} %"
        for key, table in found.items()
    )
    return f"kvmesh's share of the ideal hits: {shares}"


if __name__ == "__main__":
    main()
