"""Prompts that wait for a group of pools, and the capacity that works them off."""

from collections.abc import Sequence

from kvmesh.planner.core.fleets import Aim, Counts
from kvmesh.planner.core.groups.candidates import CandidateFleets
from kvmesh.planner.core.pool_view import PoolView

OVERLOADED = 0.5  # part of the promised share
DRAIN_S = 60.0  # least time in which a backlog is to be worked off


def backlog_s(
    views: Sequence[PoolView], waiting_tokens: int, batch_tokens: int, patience_s: float
) -> float:
    """Seconds that the ready workers need for the prompts that wait; 0 if that is in time.

    `waiting_tokens` wait in routers; the `batch_tokens` in engines may wait.
    """
    computing = sum(view.prefill_tokens for view in views)
    queued = max(computing - batch_tokens, 0) + waiting_tokens
    ready = sum(len(view.ready) for view in views)
    token_s = max((view.token_s for view in views), default=0.0)
    wait = queued * token_s / max(ready, 1)
    return wait if wait > 2 * patience_s else 0.0


def overloaded(model: CandidateFleets, aimed: Sequence[Aim], ready: Counts) -> bool:
    """True if so many first tokens are late on the ready workers that their queues grow."""
    return any(
        aim.promise.metric != "itl" and share < OVERLOADED * aim.promise.quantile
        for aim, share in zip(aimed, model.kept(ready).shares, strict=True)
    )


def extra_capacity(
    capacity: float, ready: float, startup_s: float, wait_s: float, grows: bool
) -> float:
    """Capacity beyond the needed `capacity` that works off what waits once new workers are ready.

    `ready` is the present capacity and `wait_s` its backlog. If that `grows`, it does so for the
    start-up time by what the ready workers cannot do.
    """
    missing = max(capacity - ready, 0.0) if grows else 0.0
    if wait_s <= 0 and missing <= 0.25 * capacity:
        return 0.0
    return (wait_s * ready + missing * startup_s) / max(startup_s, DRAIN_S)
