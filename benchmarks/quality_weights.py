"""The effect of `prefill_weight` on the policy `kv`: its default against a fixed weight.

Each workload meets the same engines under each weight; `none` is the default, no weight. Rows are
ratios to the base with the same seed; the share of the ideal hits is absolute. `--only` takes
prefixes of scene names.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from common import Report, parser
from quality_study import (
    SETTINGS,
    Case,
    Pick,
    Run,
    Scene,
    Study,
    before_first,
    of_ideal,
    ratios,
    throughput,
    total,
    ttft,
    windows,
)
from rich.progress import Progress

from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.report.figures import LatencyFigures
from kvmesh.workload.formats.registry import load
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.distributions import Quantiles
from kvmesh.workload.generate.profile import Agent, AgentProfile
from kvmesh.workload.model import Workload
from kvmesh.workload.replay.summary import Spread

SEEDS = (0, 1, 2)
WINDOW = 4000
NONE = "none"
SHORT = Quantiles(p50=300, p90=1500, max=6000)
ANSWER = Quantiles(p50=300, p90=1000, max=4000)
BRIEF = Quantiles(p50=50, p90=150, max=500)
LONG = Quantiles(p50=3000, p90=10_000, max=20_000)


def scenes(study: Study, trace: Path | None) -> Iterator[tuple[str, Callable[[], list[Case]]]]:
    """Names of scenes and their cases, which are generated only on demand."""

    def conversation(speed: float) -> Callable[[], list[Case]]:
        def cases() -> list[Case]:
            whole, _ = load(str(trace))
            parts = list(windows(whole, len(study.seeds), WINDOW))
            return study.cases(parts, Scene(8, 4_000_000, 512, speed))

        return cases

    def agents(
        profile: str, sessions: int, rate: float | None, scene: Scene
    ) -> Callable[[], list[Case]]:
        return lambda: study.cases(study.generated(profile, sessions, rate), scene)

    def prompts(count: int, agent: Agent, rate: float) -> Callable[[], list[Case]]:
        return lambda: study.cases(single(study, count, agent), Scene(4, 500_000, 64, rate))

    if trace is not None:
        for speed, rate in ((3.0, 10), (7.0, 24), (9.0, 31)):
            yield f"(a) {rate}/s", conversation(speed)
    for memory in (500_000, 700_000):
        scene = Scene(4, memory, 256, 4.0)
        yield f"(b) {memory / 1e6:g}M", agents("coding-agents", 90, 60, scene)
    scene = Scene(4, 1_500_000, 256, 1.0)
    yield "(b) unattended, 1.5M", agents("unattended-agents", 150, None, scene)
    yield "(c) 1M", agents("agent-team", 8, None, Scene(4, 1_000_000, 256, 2.0))
    for rate in (10, 20, 30, 45):
        yield f"documents {rate}/s", prompts(2000, one_shot(20_000, 60, BRIEF), rate)
    yield "reasoning 2/s", prompts(900, one_shot(8_000, 20, LONG), 2)
    yield "8 hot prefixes", prompts(2000, one_shot(32_000, 8, ANSWER), 40)
    for rate in (14, 17, 20, 23):
        yield f"30 hot prefixes {rate}/s", prompts(2500, one_shot(32_000, 30, ANSWER), rate)


def one_shot(shared: int, variants: int, output: Quantiles) -> Agent:
    """Prompts of `shared` tokens in `variants` versions and a short task, each sent once."""
    return Agent(
        name="one",
        share=1.0,
        prompt_tokens=shared,
        prompt_variants=variants,
        task=SHORT,
        output=output,
        steps=1,
    )


def single(study: Study, count: int, agent: Agent) -> list[Workload]:
    """`count` requests of an agent, one a second, for each seed."""
    profile = AgentProfile(description="", sessions=count, per_minute=60.0, agents=[agent])
    return [AgentGenerator(profile, seed).workload(count) for seed in study.seeds]


def tail(part: Callable[[LatencyFigures], Spread | None], run: Run) -> float:
    spread = part(run.figures.latency)
    return spread.p95 if spread else float("nan")


PICKS: dict[str, Pick] = {
    "TTFT p50": ttft,
    "TTFT p95": lambda run: tail(lambda latency: latency.ttft_s, run),
    "TTFT mean": before_first,
    "latency": total,
    "inter-token p95": lambda run: tail(lambda latency: latency.inter_token_s, run),
    "tokens/s": throughput,
}


def weighted(weight: str) -> str:
    """The policy name for `kv` with this weight, or with `none`."""
    name = f"kv, prefill_weight {weight}"
    number = None if weight == NONE else float(weight)
    SETTINGS[name] = RouterSettings(policy="kv", prefill_weight=number)
    return name


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="the conversation trace")
    arguments.add_argument("--weights", default=NONE, metavar="W,…", help="compared with the base")
    arguments.add_argument("--base", default="3", metavar="W", help="the weight of the base")
    arguments.add_argument(
        "--seeds", type=int, default=len(SEEDS), metavar="N", help="number of seeds"
    )
    arguments.add_argument("--only", default="", metavar="NAME,…", help="prefixes of scene names")
    chosen = arguments.parse_args()
    weights = chosen.weights.split(",")
    wanted = tuple(chosen.only.split(","))
    report = Report(f"prefill_weight (virtual time), ratios to {chosen.base}")
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        study = Study(report, tuple(range(chosen.seeds)), False, bar, chosen.json)
        for name, cases in scenes(study, chosen.trace):
            if name.startswith(wanted):
                compare(study, name, cases(), chosen.base, weights)
    report.finish(f"prefill_weight: {chosen.weights} against {chosen.base}", chosen.json)


def compare(study: Study, name: str, cases: list[Case], first: str, weights: list[str]) -> None:
    base = study.run(cases, weighted(first))
    study.add(f"{name}, {first}: cached", [of_ideal(run) for run in base], "% of ideal")
    for weight in weights:
        runs = study.run(cases, weighted(weight))
        for what, pick in PICKS.items():
            study.add(f"{name}, {weight}: {what}", ratios(runs, base, pick), "×")
        study.add(f"{name}, {weight}: cached", [of_ideal(run) for run in runs], "% of ideal")


if __name__ == "__main__":
    main()
