"""(b): coding agents in closed loop, with spare memory, with just enough, and with too little."""

from dataclasses import replace
from statistics import mean, median

from quality_study import (
    DEADLINE_S,
    MOST_TIMED,
    Case,
    Scene,
    Study,
    before_first,
    compare,
    lost,
    made,
    of_ideal,
    ratios,
    throughput,
    total,
    unnamed,
)

STEP = 50_000
AGENTS, PER_MINUTE = 90, 60
MOST = 24
LEAST = 9  # steps: below, the longest prompts do not fit into one engine
REASONS = {
    "elsewhere": "placed elsewhere",
    "evicted": "evicted",
    "dropped": "dropped in line",
    "unfinished": "not computed yet",
}


def coding(study: Study) -> None:
    """With people: engines are half idle while people read and type."""
    workloads = study.generated("coding-agents", AGENTS, PER_MINUTE, ends=1.0)
    spare = study.cases(workloads, Scene(4, 1_500_000, 256, 4.0))
    silent = [replace(case, workload=unnamed(case.workload)) for case in spare]
    plain = [at_share(study, case, "kv", 90, LEAST) for case in silent]
    tight = [replace(a, scene=b.scene) for a, b in zip(spare, plain, strict=True)]
    study.add("(b) tight: memory of an engine", memories(tight), "M tokens")
    gains(study, tight, spare)
    study.add_cached("(b) tight, plain LRU", plain, "kv")
    shares(study, tight)


def at_share(study: Study, case: Case, policy: str, share: float, least: int) -> Case:
    """The case with the least memory, of `least` to MOST steps, that reaches the cached share."""
    low, high = least - 1, MOST
    while high - low > 1:
        middle = (low + high) // 2
        if of_ideal(study.one(_sized(case, middle), policy)) >= share:
            high = middle
        else:
            low = middle
    return _sized(case, high)


def _sized(case: Case, steps: int) -> Case:
    return replace(case, scene=replace(case.scene, memory=steps * STEP))


def memories(cases: list[Case]) -> list[float]:
    return [case.scene.memory / 1e6 for case in cases]


def gains(study: Study, tight: list[Case], spare: list[Case]) -> None:
    """kv against the cache-blind policies in closed loop, and at equal load."""
    closed = compare(study, "(b) tight", tight)
    blind, kv = study.run(tight, "round-robin"), study.run(tight, "kv")
    shed = study.add("(b) tight: round-robin / kv, load", ratios(blind, kv, throughput), "×")
    most = [total(run) / (total(run) - before_first(run)) for run in blind]
    bound = study.add("(b) tight: round-robin / no TTFT at all, latency", most, "×")
    equal = compare(study, "(b) tight, equal load", study.at_load_of(tight, "kv"))
    compare(study, "(b) spare, equal load", study.at_load_of(spare, "kv"))
    study.conclude(
        "KV-aware on (b): more than TTFT ÷3, latency ÷2 against round-robin at equal load",
        equal.reached,
        f"{equal}, the first {MOST_TIMED:,} requests coming when they came under kv. In closed "
        f"loop {closed}: agents that wait do not ask, so that round-robin carries ×{shed:.2f} of "
        f"the load, and most of its latency is decoding: without any TTFT it would be "
        f"÷{bound:.1f}",
    )


def shares(study: Study, tight: list[Case]) -> None:
    """Losses from the ideal hits where plain LRU has 90 % of them, by reason."""
    best = max(study.add_cached("(b) tight", tight, policy, "≥ 97") for policy in ("kv", "session"))
    whys = [f"{why(study, tight, name):.1f} % {text}" for name, text in REASONS.items()]
    united = [replace(case, scene=case.scene.united) for case in tight]
    limit = study.add_cached("(b) tight, one engine of 4 ×", united, "kv")
    enough = [at_share(study, case, "kv", 97, case.scene.memory // STEP) for case in tight]
    more = [b / a for a, b in zip(memories(tight), memories(enough), strict=True)]
    factor = study.add("(b) memory for 97 % with the best, of tight", more, "×", "", "≤ 1")
    study.conclude(
        "97 % of the ideal hits on (b) at the memory at which LRU has 90 %",
        best >= 97,
        f"{best:.1f} % with the best policy; of the ideal hits are lost with kv: "
        f"{', '.join(whys)}. It is the division: contexts of up to 400K tokens share engines of "
        f"{median(memories(tight)):.2g}M. One engine of all this memory has {limit:.1f} %; "
        f"four have 97 % with ×{factor:.2f} of it",
    )


def why(study: Study, cases: list[Case], reason: str) -> float:
    runs = study.run(cases, "kv")
    name = f"(b) tight, kv: {REASONS[reason]}"
    return study.add(name, [lost(run, reason) for run in runs], "% of ideal")


def pressure(study: Study) -> None:
    """Too little memory: the contexts of all agents are several times the caches."""
    agents = study.generated("coding-agents", 120, 7200)
    alone = study.generated("unattended-agents", 300)
    gains, worst = {}, 1.0
    for name, workloads, memory, deadline_s in (
        ("coding agents", agents, 500_000, 60.0),
        ("coding agents", agents, 1_000_000, 60.0),
        ("coding agents", agents, 2_000_000, 60.0),
        ("coding agents", agents, 500_000, 180.0),
        ("coding agents", agents, 500_000, DEADLINE_S),
        ("unattended", alone, 500_000, 60.0),
    ):
        scene = Scene(4, memory, 256, 10.0 if workloads is agents else 1.0, deadline_s=deadline_s)
        cases = study.cases(workloads, scene)
        label = f"(p) {name}, 4 × {memory / 1e6:g}M, waits ≤ {deadline_s:g} s"
        every, some = (study.run(cases, policy) for policy in ("kv, all active", "kv"))
        study.add(
            f"{label}: contexts",
            [contexts(case, 120 if workloads is agents else 100) for case in cases],
            "× the memory",
        )
        for policy in ("kv, all active", "kv"):
            study.add_cached(label, cases, policy)
        study.add(f"{label}: some / all active, output per time", ratios(some, every, made), "×")
        latency = study.add(f"{label}: all / some active, latency", ratios(every, some, total), "×")
        gain, row = ratios(some, every, throughput), f"{label}: some / all active, tokens/s"
        gains[label] = study.add(row, gain, "×", "1.12–1.16", "≥ 1.25")
        worst = min(worst, latency, gains[label])
        for kind, runs in (("all", every), ("some", some)):
            refused = [float(run.figures.failed) for run in runs]
            study.add(f"{label}: requests refused, {kind} active", refused, "")
    best = max(gain for label, gain in gains.items() if label.endswith("≤ 60 s"))
    study.conclude(
        "admission of agents at memory pressure, waits ≤ 60 s: +12–16 % throughput",
        best >= 1.12,
        f"×{best:.2f} at best, tokens per second while the middle half of the output is made. An "
        "agent that rests comes back at its deadline at the latest, and its context is computed "
        "again: the more agents for a place, the fewer turns share one computation",
    )
    study.conclude(
        "admission of agents never loses more than 3 %",
        worst >= 0.97,
        f"the worst of throughput and latency: ×{worst:.2f}",
    )


def contexts(case: Case, sessions: int) -> float:
    """The mean prompts of so many concurrent sessions, over the memory of all engines."""
    rounds = case.workload.rounds
    members = [numbers for numbers in case.workload.by_session() if numbers]
    prompts = mean(mean(rounds[i].input_tokens for i in numbers) for numbers in members)
    return sessions * prompts / (case.scene.workers * case.scene.memory)
