"""Figures of a simulation: throughput, latency, cache, workers."""

from collections import Counter

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.records import Column, Records
from kvmesh.simulator.report.tiers import TierFigures, tier_figures
from kvmesh.step_times.interface import DecodeLoad
from kvmesh.workload.replay.summary import Spread, spread


class LatencyFigures(Struct, frozen=True, kw_only=True):
    """Seconds; `slowdown` is latency over that of an idle engine without a cache."""

    requests: int
    ttft_s: Spread | None
    inter_token_s: Spread | None
    total_s: Spread | None
    queue_s: Spread | None
    slowdown: Spread | None


class LostHits(Struct, frozen=True, kw_only=True):
    """Recomputed prompt tokens by cause; an infinite shared cache would have held them.

    `ends`: last block of a fully cached prompt, which the first output token needs computed.
    `unfinished`: another request was still computing them. `evicted`: every rank had evicted them.
    `elsewhere`: another rank held them, not the chosen one. `dropped`: the chosen rank held them
    and evicted them before the prefill. All but `ends` and `dropped` are as of the placement.
    """

    ends: int
    unfinished: int
    evicted: int
    elsewhere: int
    dropped: int


class CacheFigures(Struct, frozen=True, kw_only=True):
    """Prompt tokens of finished requests, and the share that an infinite shared cache would hold.

    `read_write` is cached over computed prompt tokens. `recomputed_tokens` had been computed
    before on some rank; `lost` divides them by cause.
    """

    prompt_tokens: int
    cached_tokens: int
    cached_share: float
    ideal_share: float
    share_of_ideal: float
    read_write: float
    recomputed_tokens: int
    lost: LostHits
    evicted_blocks: int


class WorkerFigures(Struct, frozen=True, kw_only=True):
    """One incarnation of a worker. `busy` is the share of the run that it spent stepping.

    A prompt that migrates or is handed off counts for each of its workers; tokens handed off by a
    prefill worker count as cached.
    """

    name: str
    requests: int
    busy: float
    prompt_tokens: int
    cached_share: float
    output_tokens: int
    preemptions: int


class FleetFigures(Struct, frozen=True, kw_only=True):
    """The fleet of a run. A worker counts from the beginning of its start until it has drained.

    `cost` is in worker-hours weighted by the cost of each group. `waiting_hours` are those of
    workers that were parked or asleep, without a device, and count in nothing else.
    """

    worker_hours: float
    cost: float
    least: int
    most: int
    additions: int
    removals: int
    promotions: int = 0
    waiting_hours: float = 0.0


class AheadFigures(Struct, frozen=True, kw_only=True):
    """Speculative prefills, the tokens that they computed, and those that were used."""

    prefills: int
    computed_tokens: int
    useful_tokens: int


class Figures(Struct, frozen=True, kw_only=True):
    """One run. `imbalance` is the busiest worker's busy time over the mean.

    `steady_tokens_per_s` is the rate over the middle half of the output tokens, which leaves out
    start and tail of the run; the rate of the whole run if that half took no time.
    """

    policy: str
    rounds: int
    failed: int
    errors: dict[str, int]
    migrations: int
    virtual_s: float
    requests_per_s: float
    output_tokens_per_s: float
    steady_tokens_per_s: float
    latency: LatencyFigures
    by_priority: dict[str, LatencyFigures]
    cache: CacheFigures
    tiers: TierFigures
    sessions: Spread | None
    workers: list[WorkerFigures]
    imbalance: float
    fleet: FleetFigures
    ahead: AheadFigures | None = None


def figures(simulation: Simulation) -> Figures:
    """The figures of a finished simulation."""
    records = simulation.records
    errors = Counter(error for error in records.error if error is not None)
    done = np.array([error is None for error in records.error], dtype=bool)
    ended = records.column("ended")
    start = float(np.min(records.column("arrived"))) if len(done) else 0.0
    length = max(float(np.max(ended)) - start, 1e-9) if len(done) else 1e-9
    workers = _workers(simulation, length)
    busy = [worker.busy for worker in workers]
    return Figures(
        policy=simulation.options.router.policy,
        rounds=len(done),
        failed=int((~done).sum()),
        errors=dict(errors.most_common(8)),
        migrations=sum(records.migrations),
        virtual_s=length,
        requests_per_s=float(done.sum()) / length,
        output_tokens_per_s=sum(records.output) / length,
        steady_tokens_per_s=_steady(records, done, length),
        latency=_latency(simulation, done),
        by_priority=_by_priority(simulation, done),
        cache=_cache(simulation, done),
        tiers=tier_figures(simulation, done, int(_prompts(simulation)[done].sum())),
        sessions=_sessions(simulation, done),
        workers=workers,
        imbalance=max(busy) / (sum(busy) / len(busy)) if sum(busy) else 1.0,
        fleet=_fleet(simulation),
        ahead=_ahead(simulation),
    )


def _ahead(simulation: Simulation) -> AheadFigures | None:
    record = simulation.speculation.record
    if simulation.options.speculative_prefill == "off":
        return None
    return AheadFigures(
        prefills=record.prefills,
        computed_tokens=record.computed_tokens,
        useful_tokens=record.useful_tokens,
    )


def _fleet(simulation: Simulation) -> FleetFigures:
    record = simulation.fleet.record
    initial = sum(group.count for group in simulation.options.workers)
    sizes = [ready + starting for _, ready, starting in record.sizes[initial - 1 :]]
    return FleetFigures(
        worker_hours=record.device_s / 3600,
        cost=record.cost_s / 3600,
        least=min(sizes, default=initial),
        most=max(sizes, default=initial),
        additions=record.ups,
        removals=record.downs,
        promotions=record.promotions,
        waiting_hours=record.waited_s / 3600,
    )


def _steady(records: Records, done: NDArray[np.bool_], length: float) -> float:
    ended, output = records.column("ended")[done], records.column("output")[done]
    order = ended.argsort(kind="stable")
    ended, produced = ended[order], output[order].cumsum()
    if not len(produced):
        return 0.0
    first, last = produced.searchsorted([produced[-1] / 4, produced[-1] * 3 / 4])
    if ended[first] == ended[last]:
        return float(produced[-1]) / length
    return float((produced[last] - produced[first]) / (ended[last] - ended[first]))


def _spread(values: Column) -> Spread | None:
    return spread(float(value) for value in values if not np.isnan(value))


def _latency(simulation: Simulation, chosen: NDArray[np.bool_]) -> LatencyFigures:
    records = simulation.records
    arrived, first, ended = (records.column(n)[chosen] for n in ("arrived", "first_token", "ended"))
    output = records.column("output")[chosen]
    gaps = np.where(output > 1, (ended - first) / np.maximum(output - 1, 1), np.nan)
    idle = _idle_latency(simulation)[chosen]
    return LatencyFigures(
        requests=int(chosen.sum()),
        ttft_s=_spread(first - arrived),
        inter_token_s=_spread(gaps),
        total_s=_spread(ended - arrived),
        queue_s=_spread(records.column("placed")[chosen] - arrived),
        slowdown=_spread((ended - arrived) / idle),
    )


def _idle_latency(simulation: Simulation) -> Column:
    """Latency of each round alone on an idle engine without a cache, in seconds."""
    core = simulation.options.workers[0].core
    model, speedup, step = core.model, core.speedup, core.limits.max_batched_tokens
    token = model.decode(DecodeLoad(1, 0, core.blocks * core.limits.block_size))
    times = []
    for round_ in simulation.workload.rounds:
        full, rest = divmod(round_.input_tokens, step)
        prefill = full * model.prefill(step) + model.prefill(rest)
        times.append((prefill + max(round_.output_tokens - 1, 0) * token) / speedup)
    return np.maximum(np.array(times, dtype=np.float64), 1e-9)


def _by_priority(simulation: Simulation, done: NDArray[np.bool_]) -> dict[str, LatencyFigures]:
    priorities = np.array([round_.priority for round_ in simulation.workload.rounds])
    levels = sorted(set(priorities.tolist()), reverse=True)
    if len(levels) < 2:
        return {}
    return {str(level): _latency(simulation, done & (priorities == level)) for level in levels}


def _cache(simulation: Simulation, done: NDArray[np.bool_]) -> CacheFigures:
    records = simulation.records
    total = int(_prompts(simulation)[done].sum())
    cached, ideal = (int(records.column(name)[done].sum()) for name in ("cached", "ideal"))
    return CacheFigures(
        prompt_tokens=total,
        cached_tokens=cached,
        cached_share=cached / max(total, 1),
        ideal_share=ideal / max(total, 1),
        share_of_ideal=cached / ideal if ideal else 1.0,
        read_write=cached / max(total - cached, 1),
        recomputed_tokens=max(ideal - cached, 0),
        lost=_lost(simulation, done),
        evicted_blocks=sum(w.evicted_blocks for w in simulation.worker_records.values()),
    )


def _prompts(simulation: Simulation) -> Column:
    return np.array([r.input_tokens for r in simulation.workload.rounds], dtype=np.float64)


def _lost(simulation: Simulation, done: NDArray[np.bool_]) -> LostHits:
    """Recomputed tokens by cause: the distances between ascending levels of each prompt."""
    records, size = simulation.records, simulation.options.block_size
    ideal = records.column("ideal")[done]
    useful = np.minimum(ideal, (_prompts(simulation)[done] - 1) // size * size)
    levels = [np.minimum(records.column("cached")[done], useful)]
    for name in ("chosen_rank", "best_rank", "computed"):
        levels.append(np.clip(records.column(name)[done], levels[-1], useful))
    cached, chosen, best, computed = (int(level.sum()) for level in levels)
    return LostHits(
        ends=int((ideal - useful).sum()),
        unfinished=int(useful.sum()) - computed,
        evicted=computed - best,
        elsewhere=best - chosen,
        dropped=chosen - cached,
    )


def _sessions(simulation: Simulation, done: NDArray[np.bool_]) -> Spread | None:
    """Cached share of each session's prompt tokens after its first round."""
    shares = []
    rounds, cached = simulation.workload.rounds, simulation.records.cached
    for members in simulation.workload.by_session():
        later = [index for index in members[1:] if done[index]]
        tokens = sum(rounds[index].input_tokens for index in later)
        if tokens:
            shares.append(sum(cached[index] for index in later) / tokens)
    return spread(shares)


def _workers(simulation: Simulation, length: float) -> list[WorkerFigures]:
    return [
        WorkerFigures(
            name=record.name,
            requests=record.requests,
            busy=record.busy_s / length,
            prompt_tokens=record.prompt_tokens,
            cached_share=record.cached_tokens / max(record.prompt_tokens, 1),
            output_tokens=record.output_tokens,
            preemptions=record.preemptions,
        )
        for record in simulation.worker_records.values()
    ]
