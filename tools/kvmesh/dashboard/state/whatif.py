"""Questions “What if”: checks, figures side by side, and the same in a terminal. Pure."""

import shlex
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from kvmesh.runtime.quantities import duration
from kvmesh.settings import Settings, redacted
from kvmesh.settings.schema import MockSettings
from kvmesh.settings.schema.mesh import NatsSettings
from kvmesh.simulator.whatif.comparison import WhatIfAnswer
from kvmesh.simulator.whatif.runs import ComparedRun
from kvmesh.workload.replay.summary import Spread

MOST_WORKERS = 256
MOST_BLOCKS = 1 << 22  # of one worker: the simulation takes memory for them
MOST_SPEEDUP = 1e6
NONE = "–"


@dataclass(frozen=True)
class WhatIf:
    """Requests of a model between two Unix times, and the configuration to try.

    What is empty or 0 stays as it is; `speedup` is that of all simulated engines.
    """

    model: str
    since: float
    until: float
    policy: str = ""
    workers: int = 0
    blocks: int = 0
    speedup: float = 1.0


@dataclass(frozen=True)
class Compared:
    """A question with its answer; the capture has ended after `requests` if it was `cut`."""

    question: WhatIf
    comparison: WhatIfAnswer
    requests: int
    cut: bool


def problem(asked: WhatIf, policies: Container[str], now: float, age_s: float) -> str:
    """The reason why a question cannot be answered; empty if it can."""
    numbers = (("workers", asked.workers, MOST_WORKERS), ("blocks", asked.blocks, MOST_BLOCKS))
    if not asked.model:
        return "Choose a model."
    if asked.policy and asked.policy not in policies:
        return f"No policy is named {asked.policy}."
    if asked.since > now:
        return "The time lies in the future."
    if asked.since >= asked.until:
        return "The time must end after it begins."
    if asked.until < now - age_s:
        return f"The route stream keeps requests for {duration(age_s)} (streams.route_age_s)."
    for name, value, most in numbers:
        if not 0 <= value <= most:
            return f"The number of {name} must be from 1 to {most:,}, or empty."
    if not 0 < asked.speedup <= MOST_SPEEDUP:
        return "The speed must be above 0."
    return ""


Figure = tuple[str, Callable[[ComparedRun], float | None], Callable[[float], str]]


def _ms(value: float) -> str:
    return f"{1000 * value:,.1f} ms"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _point(
    pick: Callable[[ComparedRun], Spread | None], point: str
) -> Callable[[ComparedRun], float | None]:
    def value(run: ComparedRun) -> float | None:
        found = pick(run)
        return None if found is None else float(getattr(found, point))

    return value


FIGURES: tuple[Figure, ...] = (
    ("requests", lambda run: run.requests, "{:,.0f}".format),
    ("failed", lambda run: run.failed, "{:,.0f}".format),
    ("cached share of prompt tokens", lambda run: run.cached_share, _share),
    *(
        (f"{name} {point}", _point(pick, point), _ms)
        for name, pick, points in (
            ("TTFT", lambda run: run.ttft_s, ("p50", "p90", "p99")),
            ("ITL", lambda run: run.inter_token_s, ("p50", "p99")),
            ("queue wait", lambda run: run.queue_s, ("p50", "p99")),
        )
        for point in points
    ),
    ("workers that served any", lambda run: run.serving, "{:,.0f}".format),
    ("busiest worker over the mean, computed tokens", lambda run: run.imbalance, "{:.2f}".format),
)


def figure_rows(comparison: WhatIfAnswer) -> Iterator[list[str]]:
    """A row for each figure, after one with the headings."""
    measured, present, chosen = comparison.measured, comparison.present, comparison.chosen
    yield [
        "", f"measured ({measured.policy})", f"present, simulated ({present.policy})",
        f"chosen, simulated ({chosen.policy})", "chosen over present",
    ]  # fmt: skip
    for name, value, text in FIGURES:
        values = [value(run) for run in (measured, present, chosen)]
        cells = [NONE if v is None else text(v) for v in values]
        yield [name, *cells, _change(values[1], values[2], share="share" in name)]


def _change(before: float | None, after: float | None, share: bool) -> str:
    if before is None or after is None:
        return NONE
    if share:
        return f"{100 * (after - before):+.1f} points"
    if before == after:
        return "="
    return f"{after / before - 1:+.1%}" if before else NONE


def fidelity(comparison: WhatIfAnswer) -> str:
    """The distance of the simulated present configuration from the measurements."""
    measured, present = comparison.measured, comparison.present
    points = 100 * (present.cached_share - measured.cached_share)
    text = f"cached share {points:+.1f} points"
    if measured.ttft_s is not None and present.ttft_s is not None and measured.ttft_s.p50:
        text += f", TTFT p50 ×{present.ttft_s.p50 / measured.ttft_s.p50:.2f}"
    return f"The simulated present configuration beside the measurements: {text}."


def span_text(compared: Compared) -> str:
    """The requests that were simulated, and whether the capture was cut."""
    found = compared.comparison
    first, last = (
        datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        for at in (found.first, found.last)
    )
    text = f"{found.measured.requests:,} requests of {compared.question.model}, {first} to {last}."
    if compared.cut:
        text += f" Cut: only the first {compared.requests:,} of this time are simulated."
    return text


def command_lines(compared: Compared, settings: Settings) -> list[str]:
    """Commands for a terminal with the same figures: one, or one for each fleet."""
    asked, found = compared.question, compared.comparison
    common = [*_nats(settings.nats), "--model", asked.model]
    common += ["--since", _moment(asked.since), "--until", _moment(asked.until)]
    if compared.cut:
        common += ["--limit", str(compared.requests)]
    if asked.speedup != MockSettings().speedup:
        common += ["--mock-speedup", f"{asked.speedup:g}"]
    if settings.mock.profile:
        common += ["--mock-profile", str(settings.mock.profile)]
    fleet = ["--workers", str(asked.workers)] if asked.workers else []
    fleet += ["--mock-blocks", str(asked.blocks)] if asked.blocks else []
    present, chosen = found.present.policy, found.chosen.policy
    if fleet:
        runs = [[*common, "--policy", present], [*common, *fleet, "--policy", chosen]]
    else:
        runs = [[*common, "--policy", ",".join(dict.fromkeys((present, chosen)))]]
    return [shlex.join(["kvmesh", "simulate", "live", *run]) for run in runs]


def _nats(nats: NatsSettings) -> Iterator[str]:
    if nats.url:
        yield from ("--nats", redacted(nats.url))
    if nats.namespace != NatsSettings().namespace:
        yield from ("--nats-namespace", nats.namespace)


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def adoption(compared: Compared) -> Iterator[str]:
    """The settings that would have the mesh do as was simulated."""
    asked, found = compared.question, compared.comparison
    if (policy := found.chosen.policy) != found.present.policy:
        yield (
            f"To adopt the policy, set router.policy to {policy} for every router"
            f" (KVMESH_ROUTER_POLICY={policy}, “kvmesh router --policy {policy}” or “kvmesh up"
            f" --policy {policy}”) and restart the routers."
        )
    if asked.workers:
        yield (
            f"To adopt the fleet, run {asked.workers} workers (up.workers); with a planner, set the"
            " bounds of its pools (planner.pools)."
        )
    if asked.blocks:
        yield (
            f"To adopt the caches, give each engine {asked.blocks:,} KV blocks: mock.blocks for"
            " mock engines, the engine's own memory settings for others."
        )


def busiest_first(run: ComparedRun) -> list[int]:
    """The prompt tokens that each worker computed, the most first."""
    return sorted(
        (round(w.prompt_tokens * (1 - w.cached_share)) for w in run.workers), reverse=True
    )
