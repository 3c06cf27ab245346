"""Routing policies for agents, beside the field's claims: all in virtual time.

Workloads: (a) the public Mooncake conversation trace, if `--trace` names it; (b) coding agents in
closed loop with TraceLab's statistics, with and without spare memory, in quality_coding.py; (c)
agent teams around a shared prompt; (d) one latency-sensitive request in five, up to overload. Every
policy meets the same mock engines. The effect of retention is in retention.py.
"""

import argparse
import sys
from pathlib import Path
from statistics import mean

import msgspec
import numpy as np
from common import Report, parser
from quality_coding import coding, pressure
from quality_study import Case, Scene, Study, compare, windows
from rich.progress import Progress

from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.report.figures import figures
from kvmesh.workload.formats.registry import load
from kvmesh.workload.model import Workload

SEEDS = (0, 1, 2)
WINDOW = 6000


def conversation(study: Study, trace: Path) -> None:
    """(a): open loop, from a load that all policies sustain to one that only good ones do."""
    whole, _ = load(str(trace))
    rate = len(whole) / max(r.at_s for r in whole.rounds)
    workloads = list(windows(whole, len(study.seeds), WINDOW))
    gains = []
    for memory in (1_500_000, 4_000_000, 16_000_000) if study.full else (4_000_000,):
        for speed in (7.0, 9.0, 10.0) if study.full else (7.0, 9.0):
            cases = study.cases(workloads, Scene(8, memory, 512, speed))
            label = f"(a) {memory / 1e6:g}M, {rate * speed:.0f} requests/s"
            gains.append(compare(study, label, cases))
            study.add_cached(label, cases, "kv")
    best = max(gains, key=lambda gain: gain.claimed)
    study.conclude(
        "KV-aware on (a): TTFT ÷3, latency ÷2 against round-robin at equal load",
        best.reached,
        f"{best}. Only 37 % of this trace's tokens repeat, so well below saturation there is "
        "little to save; the gain is greatest where round-robin is saturated and kv is not, and "
        f"there grows with the length of the trace, of which each seed has {WINDOW:,} requests",
    )


def teams(study: Study) -> None:
    """(c): no worker should compute the shared prompt again."""
    workloads = study.generated("agent-team", 12 if study.full else 8)
    cases = study.cases(workloads, Scene(4, 1_000_000, 256, 2.0))
    best = 0.0
    for policy in ("kv", "session", "round-robin"):
        runs = [study.simulate(case, policy) for case in cases]
        mates = [kind_share(run, "teammate") for run in runs]
        share = study.add(f"(c) teammates cached, {policy}", mates, "%", "79.4", "≥ 95")
        everybody = [kind_share(run, "") for run in runs]
        study.add(f"(c) all agents cached, {policy}", everybody, "%", "97.2")
        first = [first_prompts(run, "teammate") for run in runs]
        study.add(f"(c) teammates with a cached first prompt, {policy}", first, "%")
        best = max(best, share)
    ideal = [kind_share(run, "teammate", "ideal") for run in runs]
    limit = study.add("(c) teammates, ideal", ideal, "%")
    study.conclude(
        "teammates at ≥ 95 % cached on (c)",
        best >= 95,
        f"{best:.1f} % with the best policy, of {limit:.1f} % that are possible",
    )


def kind_share(run: Simulation, kind: str, column: str = "cached") -> float:
    """Cached percent of the prompt tokens of sessions of a kind (all if empty)."""
    workload, hits = run.workload, run.records.column(column)
    chosen = [
        i for i, r in enumerate(workload.rounds) if kind in ("", workload.sessions[r.session].kind)
    ]
    tokens = sum(workload.rounds[i].input_tokens for i in chosen)
    return 100 * float(hits[chosen].sum()) / tokens


def first_prompts(run: Simulation, kind: str) -> float:
    """Percent of sessions of a kind whose first prompt hit nine tenths of the ideal."""
    good = []
    for number, members in enumerate(run.workload.by_session()):
        if members and run.workload.sessions[number].kind == kind:
            first = members[0]
            good.append(run.records.cached[first] >= 0.9 * run.records.ideal[first])
    return 100 * mean(good)


def priority(study: Study) -> None:
    """(d): the same load with and without tags, from below capacity to overload."""
    tagged = study.generated("priority-mix", 2500 if study.full else 1500)
    plain = [untagged(workload) for workload in tagged]
    full = [capacity(study, case) for case in study.cases(plain, Scene(4, 500_000, 64, 40.0))]
    study.add("(d) capacity", full, "× the profile's rate")
    cuts, changes = [], []
    for share in (80, 100, 110, 120):
        less, change = [], []
        for seed, with_tags, without, speed in zip(study.seeds, tagged, plain, full, strict=True):
            loaded = Scene(4, 500_000, 64, speed * share / 100)
            runs = [study.simulate(Case(w, loaded, seed), "kv") for w in (with_tags, without)]
            after, before = (urgent_ttft(run, with_tags) for run in runs)
            less.append(100 * (1 - after[0] / before[0]))
            change.append(100 * (after[1] / before[1] - 1))
        name = f"(d) {share} %: TTFT p50 of the tagged"
        cuts.append(study.add(name, less, "% less", "63", "≥ 63"))
        changes.append(study.add(f"(d) {share} %: throughput", change, "% more", "", "within 3"))
    study.conclude(
        "priority: TTFT p50 of the tagged −63 % on (d), throughput within 3 %",
        max(cuts) >= 63 and max(map(abs, changes)) <= 3,
        f"{-max(cuts):.0f} % at best, throughput {max(changes, key=abs):+.1f} % at most. Below "
        "capacity nobody queues, so there is nothing to overtake",
    )


def capacity(study: Study, case: Case) -> float:
    """Completed requests per second under overload, relative to the profile's rate."""
    ended = np.sort(study.simulate(case, "kv").records.column("ended"))
    first, last = len(ended) // 5, len(ended) * 4 // 5
    through = (last - first) / (ended[last] - ended[first])
    return float(through * max(r.at_s for r in case.workload.rounds) / len(case.workload))


def untagged(workload: Workload) -> Workload:
    rounds = [msgspec.structs.replace(round_, priority=0) for round_ in workload.rounds]
    return msgspec.structs.replace(workload, rounds=rounds)


def urgent_ttft(run: Simulation, tags: Workload) -> tuple[float, float]:
    """Median TTFT of the rounds that `tags` calls urgent, and output tokens per second."""
    urgent = np.array([round_.priority > 0 for round_ in tags.rounds])
    waits = run.records.column("first_token") - run.records.column("arrived")
    return float(np.median(waits[urgent])), figures(run).steady_tokens_per_s


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="the conversation trace")
    size = arguments.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="one seed")
    size.add_argument("--full", action="store_true", help="longer, and (a) with three memory sizes")
    arguments.add_argument("--only", metavar="a,b,…", default="a,b,p,c,d", help="p: b short of RAM")
    chosen = arguments.parse_args()
    report = Report("Agentic serving quality (virtual time)", "the field")
    seeds = SEEDS[:1] if chosen.quick else SEEDS
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        study = Study(report, seeds, chosen.full, bar, chosen.json)
        measure(study, chosen)
    reached = sum(holds for holds, _ in study.verdicts)
    lines = [f"{'reached' if holds else 'NOT reached'}: {text}" for holds, text in study.verdicts]
    summary = f"quality: {reached} of {len(lines)} claims of the field are met"
    report.finish("\n".join([*lines, summary]), chosen.json)


def measure(study: Study, chosen: argparse.Namespace) -> None:
    wanted = chosen.only.split(",")
    if "a" in wanted:
        if chosen.trace is not None and chosen.trace.exists():
            conversation(study, chosen.trace)
        else:
            print("skipping (a): --trace names no conversation trace", file=sys.stderr)
    for name, part in (("b", coding), ("p", pressure), ("c", teams), ("d", priority)):
        if name in wanted:
            part(study)


if __name__ == "__main__":
    main()
