"""The step profiles of pools, read from their files."""

from collections.abc import Iterable
from dataclasses import replace

from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.step_times.profile import StepProfileError
from kvmesh.step_times.registry import load_step_profile

BEYOND = 2.0  # times the range that the profile covers
OFF = 2.0  # factor between measured and profiled times


def with_step_profiles(pools: Iterable[Pool]) -> list[Pool]:
    """The pools with the contents of their profiles; raises PlannerConfigError for unfit ones."""
    return [_with_step_profile(pool) if pool.profile else pool for pool in pools]


def _with_step_profile(pool: Pool) -> Pool:
    try:
        return replace(pool, step_profile=load_step_profile(pool.profile))
    except StepProfileError as error:
        raise PlannerConfigError(f"planner.pools: pool {pool.name}: {error}") from error


def unfit_profile(view: PoolView) -> str:
    """The reason why a pool's profile does not describe its workers; empty if it may."""
    pool, kind, known = view.pool, view.kind(), view.step_times
    if pool.step_profile is None or kind is None or known is None or not view.cards:
        return ""
    name = f"profile {pool.profile} of pool {pool.name}"
    prompt, active = pool.step_profile.measured_tokens
    if known.source == "profile" and kind.step_tokens > BEYOND * prompt:
        return f"{name} ends at {prompt:,.0f} prompt tokens; a step has {kind.step_tokens:,}"
    if known.source == "profile" and kind.kv_tokens > BEYOND * active:
        return f"{name} ends at {active:,.0f} KV tokens; a worker has {kind.kv_tokens:,}"
    if not 1 / OFF <= known.factor <= OFF:
        return f"the workers take {known.factor:.2g} times the step times of {name}"
    return ""
