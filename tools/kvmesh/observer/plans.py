"""Decisions of planners as a history: in order, by one planner at a time. Pure."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from kvmesh.bus.messages import ScalingDecision

TAKE_OVER_S = 300.0  # a planner that leads records a decision every two minutes at least
_QUANTILE = re.compile(r"(?:^|[ :])p(\d+(?:\.\d+)?)=")


def by_model(decisions: Iterable[ScalingDecision]) -> dict[str, list[ScalingDecision]]:
    """The decisions about each model in the order of their times, without repeats."""
    found: dict[str, dict[tuple[float, str], ScalingDecision]] = {}
    for each in decisions:
        found.setdefault(each.model, {})[each.time, each.planner] = each
    return {
        model: [own[key] for key in sorted(own)]
        for model, own in sorted(found.items(), key=lambda item: item[0])
    }


def leading(decisions: Sequence[ScalingDecision]) -> list[ScalingDecision]:
    """Those of the planner that leads, of one model's decisions as `by_model` orders them.

    For a moment two planners may decide. A planner leads until none of its decisions follows within
    TAKE_OVER_S.
    """
    following: dict[str, Iterator[float]] = {}
    for planner in {each.planner for each in decisions}:
        following[planner] = iter([each.time for each in decisions if each.planner == planner])
    next_of = {planner: next(times) for planner, times in following.items()}
    found: list[ScalingDecision] = []
    for each in decisions:
        next_of[each.planner] = next(following[each.planner], float("inf"))
        leader = found[-1].planner if found else each.planner
        if leader == each.planner or next_of[leader] - each.time > TAKE_OVER_S:
            found.append(each)
    return found


def worker_hours(decisions: Sequence[ScalingDecision]) -> float:
    """Ready workers over time, between the first and the last decision about one model."""
    return sum(
        sum(pool.ready for pool in before.pools.values()) * (after.time - before.time) / 3600
        for before, after in pairwise(decisions)
    )


def sizes(decision: ScalingDecision) -> str:
    """The workers wanted in each pool before and from now on."""
    return ", ".join(f"{name} {p.before} → {p.wanted}" for name, p in decision.pools.items())


def promised_share(promise: str) -> float | None:
    """The share of requests that a promise such as `ttft batch:p95=2s` names; None if none."""
    found = _QUANTILE.search(promise)
    return float(found[1]) / 100 if found else None
