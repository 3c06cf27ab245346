"""The load of an inference server, from the series of its /metrics."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from kvmesh.worker.adapters.cached_sources import SERIES, tokens_by_tier
from kvmesh.worker.capabilities import TierCounts

_VLLM = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "usage": "vllm:kv_cache_usage_perc",
    "steps": "vllm:iteration_tokens_total_count",
}
_SGLANG = {
    "running": "sglang:num_running_reqs",
    "waiting": "sglang:num_queue_reqs",
    "usage": "sglang:token_usage",
}
_RANKS = ("dp_rank", "engine")  # labels of a data-parallel rank: SGLang's, vLLM's

Sample = tuple[str, Mapping[str, str], float]


class Gauges(NamedTuple):
    """Current metrics of the server, None if absent; `usage` is the share of blocks in use.

    `tiers` are of kvmesh's connector to the block manager. `served` are the cached prompt tokens by
    tier, since the server's start, as vLLM counts them by source.
    """

    running: int | None = None
    waiting: int | None = None
    usage: float | None = None
    steps: float | None = None
    tiers: TierCounts | None = None
    served: list[int] | None = None


def gauges_of(samples: Iterable[Sample], model: str) -> Gauges:
    """The gauges of `model`, over all its data-parallel ranks: sums, and the mean of the usages."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample[0], []).append(sample)
    names = _SGLANG if _SGLANG["running"] in by_name else _VLLM
    found = {
        key: _ranks(by_name.get(name, []), model, max if key == "usage" else sum)
        for key, name in names.items()
    }
    totals = {key: sum(ranks) if ranks else None for key, ranks in found.items()}
    usages, running, waiting = found["usage"], totals["running"], totals["waiting"]
    return Gauges(
        None if running is None else int(running),
        None if waiting is None else int(waiting),
        sum(usages) / len(usages) if usages else None,
        totals.get("steps"),
        served=_served(by_name.get(SERIES, []), model),
    )


def rank_gauges(samples: Iterable[Sample], model: str, ranks: Iterable[int]) -> list[Gauges]:
    """The gauges of each of these data-parallel ranks, all None where no series names it."""
    of_rank: dict[str, list[Sample]] = {}
    for sample in samples:
        if rank := next((sample[1][name] for name in _RANKS if name in sample[1]), None):
            of_rank.setdefault(rank, []).append(sample)
    return [gauges_of(of_rank.get(str(rank), []), model) for rank in ranks]


def vllm_ranks(samples: Iterable[Sample], model: str) -> list[int]:
    """The data-parallel ranks that a vLLM server runs of `model`; empty if it does not tell."""
    found = _of_model([sample for sample in samples if sample[0] == _VLLM["running"]], model)
    engines = {labels.get("engine", "") for _, labels, _ in found}
    return sorted(int(engine) for engine in engines if engine.isdecimal())


def lower_tiers(
    kvbm: TierCounts | None, served: list[int] | None, block_size: int
) -> TierCounts | None:
    """The blocks moved by kvmesh's connector and loaded by those of the server; None without any.

    vLLM does not know from which tier kvmesh's connector loads, and counts it in the last one.
    """
    loaded = [tokens // block_size for tokens in served or ()]
    if not any(loaded[1:]):
        return kvbm
    if kvbm is None:
        return TierCounts(loaded=[0, *loaded[1:]])
    both = zip(kvbm.loaded, [0, *loaded[1:-1], 0], strict=True)
    return replace(kvbm, loaded=[sum(blocks) for blocks in both])


def _of_model(samples: list[Sample], model: str) -> list[Sample]:
    """Those of a model; all where none has its name, as under an alias."""
    return [s for s in samples if s[1].get("model_name", model) == model] or samples


def _served(samples: list[Sample], model: str) -> list[int] | None:
    of_model = _of_model(samples, model)
    if not of_model:
        return None
    by_source: dict[str, float] = {}
    for _, labels, value in of_model:
        source = labels.get("source", "")
        by_source[source] = by_source.get(source, 0) + value
    return tokens_by_tier(by_source)


def _ranks(
    samples: list[Sample], model: str, joined: Callable[[Iterable[float]], float]
) -> list[float]:
    """The value of each data-parallel rank; a server may serve other models.

    The processes of a rank (labels `…_rank`, `pid`) repeat its value. A label that differs among
    other series splits it: SGLang splits a total by priority and repeats it without one, `joined`
    makes one value of parts without a total. Beside ranks, one without a rank is their total.
    """
    ranks: dict[str | None, list[Sample]] = {}
    for sample in _of_model(samples, model):
        rank = next((sample[1][name] for name in _RANKS if name in sample[1]), None)
        ranks.setdefault(rank, []).append(sample)
    if len(ranks) > 1:
        ranks.pop(None, None)
    return [_value(of_rank, joined) for of_rank in ranks.values()]


def _value(samples: list[Sample], joined: Callable[[Iterable[float]], float]) -> float:
    names = {
        name
        for _, labels, _ in samples
        for name in labels
        if name not in ("pid", "model_name") and not name.endswith("_rank")
    }
    splits = [name for name in sorted(names) if len({s[1].get(name) for s in samples}) > 1]
    parts: dict[tuple[str, ...], float] = {}
    for _, labels, value in samples:
        part = tuple(labels.get(name, "") for name in splits)
        parts[part] = max(value, parts.get(part, value))
    for _ in splits:
        others: dict[tuple[str, ...], dict[str, float]] = {}
        for (first, *rest), value in parts.items():
            others.setdefault(tuple(rest), {})[first] = value
        parts = {
            rest: values[""] if "" in values else joined(values.values())
            for rest, values in others.items()
        }
    return parts[()]
