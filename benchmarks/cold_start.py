"""Prompts that begin alike and arrive together: how often a fleet computes their common prefix.

Siblings such as the agents of a team send the same cold prefix, at once or within seconds. A case
replays them in virtual time on mock engines, with the wait of routers for a prefix that is
being computed and without it, on an idle fleet and beside chats that share nothing.
"""

import sys
from random import Random
from typing import NamedTuple

from common import Report, median, parser, percentile

from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

BLOCK = 64
BLOCKS = 16_384  # of 64 tokens: 1M tokens
LIMITS = SchedulerLimits(block_size=BLOCK, max_sequences=256, max_batched_tokens=8192)
TASK_TOKENS = (100, 1500)  # of a sibling's own part
OUTPUT_TOKENS = (50, 300)
CHAT_TOKENS = (500, 6000)
CHATS_PER_S = 1.2  # for each engine
WARM_S = 60.0  # of chats before the siblings
UNITS = {
    "computed": "prefixes",
    "TTFT mean": "ms",
    "TTFT p50": "ms",
    "TTFT p95": "ms",
    "others p50": "ms",
}


class Case(NamedTuple):
    """`siblings` prompts with `prefix` common tokens arrive within `within_s` seconds."""

    engines: int
    siblings: int
    prefix: int
    within_s: float
    chats: bool

    def __str__(self) -> str:
        arrival = "at once" if not self.within_s else f"in {self.within_s:g} s"
        beside = ", beside chats" if self.chats else ""
        return f"{self.siblings} × {self.prefix // 1000}k {arrival}, {self.engines} engines{beside}"


def workload(case: Case, seed: int) -> Workload:
    """The siblings' requests, after those of the chats, if there are any."""
    rng, tree = Random(f"{case} {seed}"), Tree()
    arrivals: list[tuple[float, int, int, int]] = []  # time, branch, tokens of prompt and output
    start = WARM_S if case.chats else 0.0
    if case.chats:
        at, rate = 0.0, CHATS_PER_S * case.engines
        while (at := at + rng.expovariate(rate)) < WARM_S + 60.0:
            arrivals.append((at, tree.fork(), rng.randint(*CHAT_TOKENS), rng.randint(50, 400)))
    prefix = tree.fork()
    for _ in range(case.siblings):
        at = start + rng.random() * case.within_s
        own = tree.fork(prefix, case.prefix)
        tokens = case.prefix + rng.randint(*TASK_TOKENS)
        arrivals.append((at, own, tokens, rng.randint(*OUTPUT_TOKENS)))
    arrivals.sort()
    sessions = [
        Session(name=f"s{number}", kind="sibling" if tree.parent(branch)[1] else "chat")
        for number, (_, branch, _, _) in enumerate(arrivals)
    ]
    rounds = [
        Round(
            session=number,
            branch=branch,
            output_branch=branch,
            input_tokens=tokens,
            output_tokens=output,
            at_s=at,
        )
        for number, (at, branch, tokens, output) in enumerate(arrivals)
    ]
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def run(case: Case, seed: int, router: RouterSettings, replicas: int) -> dict[str, float]:
    """The figures of one run, in the units of UNITS."""
    work = workload(case, seed)
    simulation = Simulation(
        work,
        SimulationOptions(
            router=router,
            workers=(WorkerOptions(case.engines, CoreOptions(BLOCKS, LIMITS)),),
            seed=seed,
            replicas=replicas,
        ),
    )
    records = simulation.run()
    ttft = records.column("first_token") - records.column("arrived")
    kinds = [session.kind for session in work.sessions]
    siblings = [n for n, kind in enumerate(kinds) if kind == "sibling"]
    late = [n for n, kind in enumerate(kinds) if kind == "chat" and work.rounds[n].at_s > WARM_S]
    waits = [1000 * float(ttft[n]) for n in siblings]
    return {
        "computed": sum(max(case.prefix - records.cached[n], 0) for n in siblings) / case.prefix,
        "TTFT mean": sum(waits) / len(waits),
        "TTFT p50": median(waits),
        "TTFT p95": percentile(waits, 0.95),
        "others p50": 1000 * median(float(ttft[n]) for n in late),
    }


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--seeds", type=int, default=3, metavar="N")
    arguments.add_argument("--routers", type=int, default=1, metavar="N", help="router replicas")
    arguments.add_argument("--engines", default="1,2,4", metavar="N,…")
    arguments.add_argument("--siblings", default="10,40", metavar="N,…")
    arguments.add_argument("--prefixes", default="5,20,60", metavar="K,…", help="in 1000 tokens")
    chosen = arguments.parse_args()
    seeds = range(chosen.seeds)
    cases = [
        Case(engines, siblings, prefix * 1000, within_s, chats)
        for engines in map(int, chosen.engines.split(","))
        for siblings in map(int, chosen.siblings.split(","))
        for prefix in map(int, chosen.prefixes.split(","))
        for within_s in (0.0, 2.0)
        for chats in (False, True)
    ]
    report = Report("Cold starts (virtual time)", "without waits")
    for case in cases:
        before, found = (
            [
                run(case, seed, RouterSettings(await_prefixes=waits), chosen.routers)
                for seed in seeds
            ]
            for waits in (False, True)
        )
        for what, unit in UNITS.items():
            value, baseline = (median(each[what] for each in runs) for runs in (found, before))
            if value == value:
                report.add(f"{case}: {what}", round(value, 2), unit, f"{baseline:.2f}")
        print(case, file=sys.stderr, flush=True)
    report.finish("cold start: routers that wait for a prefix, and that do not", chosen.json)


if __name__ == "__main__":
    main()
