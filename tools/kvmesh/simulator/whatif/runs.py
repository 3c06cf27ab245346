"""The figures of the same requests as a live mesh served them, and as a simulation does."""

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.records import Column
from kvmesh.simulator.report.curves import cached_over_time, distribution
from kvmesh.simulator.report.figures import WorkerFigures, figures
from kvmesh.workload.capture import CapturedRound
from kvmesh.workload.replay.summary import Spread, spread

POINTS = 200  # of the distribution of a latency
Curve = list[tuple[float, float]]


class WorkerShare(Struct, frozen=True, kw_only=True):
    """The requests and prompt tokens that one worker computed or had cached."""

    name: str
    requests: int
    prompt_tokens: int
    cached_share: float


class ComparedRun(Struct, frozen=True, kw_only=True):
    """Captured requests under one configuration; times in seconds, shares from 0 to 1.

    `ttft_curve` has the share of requests up to each TTFT, `cached_curve` the cached share after
    each time since the first arrival.
    """

    policy: str
    requests: int
    failed: int
    cached_share: float
    ttft_s: Spread | None
    inter_token_s: Spread | None
    queue_s: Spread | None
    workers: list[WorkerShare]
    ttft_curve: Curve
    cached_curve: Curve

    @property
    def serving(self) -> int:
        """The workers that served any of the requests."""
        return sum(worker.requests > 0 for worker in self.workers)

    @property
    def imbalance(self) -> float:
        """The most prompt tokens that one worker computed, over the mean."""
        computed = [w.prompt_tokens * (1 - w.cached_share) for w in self.workers]
        return max(computed) * len(computed) / sum(computed) if sum(computed) else 1.0


def measured_policies(captured: Sequence[CapturedRound]) -> list[str]:
    """The policies that placed the requests, the one of most requests first."""
    names = [each.decision.policy for each in captured]
    return sorted(set(names), key=lambda name: (-names.count(name), name))


def measured_run(captured: Sequence[CapturedRound], ranks: Iterable[str] = ()) -> ComparedRun:
    """The mesh's own measurements of requests, sorted by arrival.

    `ranks` are the names of live ranks; they may have served none of them.
    """
    outcomes = [each.outcome for each in captured]
    prompt = np.array([each.decision.tokens for each in captured], dtype=np.float64)
    cached = np.array([outcome.cached_tokens for outcome in outcomes], dtype=np.float64)
    first = captured[0].arrival if captured else 0.0
    arrived = np.array([each.arrival - first for each in captured], dtype=np.float64)
    ttft = [o.ttft_s for o in outcomes if o.ttft_s is not None]
    return ComparedRun(
        policy=", ".join(measured_policies(captured)),
        requests=len(captured),
        failed=sum(outcome.finish == "error" for outcome in outcomes),
        cached_share=float(cached.sum()) / max(float(prompt.sum()), 1.0),
        ttft_s=spread(ttft),
        inter_token_s=spread(
            (o.total_s - o.ttft_s) / (o.output_tokens - 1)
            for o in outcomes
            if o.ttft_s is not None and o.output_tokens > 1
        ),
        queue_s=spread(o.wait_s for o in outcomes),
        workers=_measured_workers(captured, ranks),
        ttft_curve=_thinned(*distribution(np.array(ttft, dtype=np.float64))),
        cached_curve=_thinned(*cached_over_time(arrived, prompt, cached)),
    )


def rank_name(worker: str, rank: int) -> str:
    """A worker's name, with the number of any rank but the first."""
    return f"{worker}#{rank}" if rank else worker


def _measured_workers(captured: Sequence[CapturedRound], ranks: Iterable[str]) -> list[WorkerShare]:
    sums: dict[str, list[int]] = {name: [0, 0, 0] for name in ranks}
    for each in captured:
        rank = each.decision.prefill or each.decision.chosen
        own = sums.setdefault(rank_name(rank.worker, rank.rank), [0, 0, 0])
        own[0] += 1
        own[1] += each.decision.tokens
        own[2] += each.outcome.cached_tokens
    return [
        WorkerShare(name=name, requests=n, prompt_tokens=t, cached_share=min(c / max(t, 1), 1.0))
        for name, (n, t, c) in sorted(sums.items())
    ]


def simulated_run(simulation: Simulation) -> ComparedRun:
    """The figures of a simulation that has ended."""
    records, found = simulation.records, figures(simulation)
    served = np.array([error is None for error in records.error], dtype=np.float64)
    tokens = np.array([r.input_tokens for r in simulation.workload.rounds], dtype=np.float64)
    arrived, first = records.column("arrived"), records.column("first_token")
    since = arrived - (np.nanmin(arrived) if len(arrived) else 0.0)
    cached = records.column("cached") * served
    return ComparedRun(
        policy=found.policy,
        requests=found.rounds,
        failed=found.failed,
        cached_share=found.cache.cached_share,
        ttft_s=found.latency.ttft_s,
        inter_token_s=found.latency.inter_token_s,
        queue_s=found.latency.queue_s,
        workers=[_share(worker) for worker in found.workers],
        ttft_curve=_thinned(*distribution(first - arrived)),
        cached_curve=_thinned(*cached_over_time(since, tokens * served, cached)),
    )


def _share(worker: WorkerFigures) -> WorkerShare:
    return WorkerShare(
        name=worker.name,
        requests=worker.requests,
        prompt_tokens=worker.prompt_tokens,
        cached_share=worker.cached_share,
    )


def _thinned(x: Column, y: Column) -> Curve:
    picked = np.linspace(0, len(x) - 1, min(len(x), POINTS)).astype(np.intp)
    return [(float(a), float(b)) for a, b in zip(x[picked], y[picked], strict=True)]
