"""The record of a decision, with its reasons."""

from kvmesh.bus.messages import FleetCandidate, PoolPlan, ScalingDecision, SwitchedRole
from kvmesh.planner.actions import Decided
from kvmesh.planner.core.planner import PlannerCore
from kvmesh.planner.core.pool_view import PoolView

KEPT_S = 300.0


def scaling_decision(
    core: PlannerCore, decided: Decided, planner: str, now: float, connector: str = ""
) -> ScalingDecision:
    """The record of a decision by the instance `planner`."""
    plan, before = decided.plan, decided.before
    time, now = now, core.time(now)
    since, promises = now - KEPT_S, core.promises
    prompt, uncached = core.traffic.mean_lengths(since)
    kept = {
        str(promise): measured.share
        for promise in promises
        if (measured := core.traffic.kept(promise, promises, since, now)) is not None
    }
    changed = {view.pool.name: group.changed_at for group in core.groups for view in group.views}
    return ScalingDecision(
        model=decided.model,
        time=time,
        planner=planner,
        reason=plan.reason,
        changed=decided.changed,
        connector=connector,
        pools={
            view.pool.name: pool_plan(view, before.get(view.pool.name, 0), changed[view.pool.name])
            for view in core.pools
        },
        signals={
            "arrivals_per_s": plan.level,
            "forecast_per_s": plan.forecast,
            "waiting_requests": float(core.traffic.waiting),
            "waiting_tokens": float(core.traffic.waiting_tokens),
            "oldest_wait_s": core.traffic.oldest_wait(now),
            "waking_requests": float(core.requests_without_worker(now)),
            "prompt_tokens": prompt,
            "uncached_tokens": uncached,
            "output_tokens": core.traffic.mean_output,
            "prefill_backlog_tokens": float(sum(view.prefill_tokens for view in core.pools)),
        },
        kept=kept,
        candidates=[
            FleetCandidate(
                workers=each.workers,
                cost=each.cost,
                shares=dict(zip(each.promises, each.kept.shares, strict=True)),
                quantiles=dict(zip(each.promises, each.kept.quantiles, strict=True)),
                busy=each.kept.busy,
            )
            for each in plan.candidates
        ],
        stop=plan.stop,
        sleep=plan.sleep,
        switches=[
            SwitchedRole(instance=each.instance, source=each.source, target=each.target)
            for each in plan.switches
        ],
        unreachable=sorted(core.unreachable),
        cost=sum(view.wanted * view.pool.cost for view in core.pools),
    )


def pool_plan(view: PoolView, before: int, changed_at: float) -> PoolPlan:
    """The record of one pool, of which `before` workers were wanted until now."""
    times = view.step_times
    return PoolPlan(
        ready=len(view.ready),
        starting=view.starts.pending,
        before=before,
        wanted=view.wanted,
        startup_s=view.starts.startup_s,
        failed=view.starts.failed,
        parked=len(view.standby.waiting),
        asleep=view.standby.asleep,
        may_wait=view.pool.parked + view.pool.asleep,
        rise=view.rises.most(view.starts.startup_s),
        promotion_s=view.starts.promotion_s if view.pool.promotes else 0.0,
        step_times=times.source if times is not None else "none",
        samples=view.samples,
        profile_factor=times.factor if times is not None else 1.0,
        manual_at=max(view.manual_at, 0.0),
        changed_at=max(changed_at, 0.0),
        blocked_at=max(view.starts.blocked_at, 0.0),
    )
