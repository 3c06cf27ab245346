"""The planner's options, from its settings and from the values set at run time."""

import re
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import msgspec

from kvmesh.bus.messages import batch_classes
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.pools import Pool, parse_pools
from kvmesh.planner.core.promises import Promise, parse_promises, promises_of
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.planner.prediction.interface import PredictorError
from kvmesh.planner.prediction.registry import make_predictor
from kvmesh.planner.profiles import with_step_profiles
from kvmesh.settings.schema import PlannerSettings, RouterSettings

# Settings that `kvmesh plan set` changes; the others hold from the start of the process.
CHANGEABLE = (
    "pools",
    "max_devices",
    "ttft",
    "itl",
    "queue",
    "target",
    "up_cooldown_s",
    "down_cooldown_s",
)

_ROUTER = RouterSettings()


def with_changes(settings: PlannerSettings, changes: dict[str, Any]) -> PlannerSettings:
    """The settings with values set at run time; raises PlannerConfigError for invalid ones."""
    for key in changes:
        if key not in CHANGEABLE:
            raise PlannerConfigError(
                f"{key} cannot be set at run time; these can: {', '.join(CHANGEABLE)}"
            )
    try:
        changed = msgspec.convert(changes, PlannerSettings, strict=False)
    except msgspec.ValidationError as error:
        raise PlannerConfigError(_plain(str(error))) from None
    return msgspec.structs.replace(settings, **{key: getattr(changed, key) for key in changes})


def plan_options(
    settings: PlannerSettings, router: RouterSettings = _ROUTER
) -> tuple[PlanOptions, list[Pool]]:
    """Options and pools; raises PlannerConfigError where they are invalid or contradict."""
    pools = with_step_profiles(parse_pools(settings.pools))
    serves = {pool.serves for pool in pools}
    if serves == {"prefill"}:
        raise PlannerConfigError("planner.pools: at least one pool must decode")
    for key in ("interval_s", "window_s", "startup_s"):
        if not isfinite(getattr(settings, key)):
            raise PlannerConfigError(f"planner.{key} must be finite")
    promises: list[Promise] = []
    for metric in ("ttft", "itl", "queue"):
        promises += parse_promises(metric, getattr(settings, metric))
    devices = settings.max_devices
    least = sum(pool.min * pool.devices for pool in pools)
    if devices is not None and least > devices:
        raise PlannerConfigError(
            f"planner.max_devices {devices} is below the {least} devices of the pools' minimums"
        )
    try:
        make_predictor(settings.predictor, settings.interval_s)
    except PredictorError as error:
        raise PlannerConfigError(f"planner.predictor: {error}") from error
    options = PlanOptions(
        promises=promises,
        target=settings.target,
        predictor=settings.predictor,
        interval_s=settings.interval_s,
        window_s=settings.window_s,
        startup_s=settings.startup_s,
        up_cooldown_s=settings.up_cooldown_s,
        down_cooldown_s=settings.down_cooldown_s,
        zero_after_s=settings.zero_after_s,
        manual_hold_s=settings.manual_hold_s,
        max_devices=inf if devices is None else devices,
        disagg_tokens=router.disagg_tokens,
        batch_classes=batch_classes(router.batch_classes),
    )
    return options, pools


def options_of(options: PlanOptions, model: str) -> PlanOptions:
    """The options for one model: with the promises that hold for it."""
    return replace(options, promises=promises_of(options.promises, model))


def check_same_pools(pools: list[Pool], others: list[Pool]) -> None:
    """Raise PlannerConfigError unless `others` differ from `pools` in sizes and costs only."""
    if {pool.name for pool in pools} != {pool.name for pool in others}:
        raise PlannerConfigError(
            f"planner.pools: pools are not added or removed at run time; they are"
            f" {', '.join(pool.name for pool in pools)}"
        )
    for pool in pools:
        other = next(other for other in others if other.name == pool.name)
        for key in ("serves", "model", "target", "kind", "parked", "asleep"):
            own, new = getattr(pool, key), getattr(other, key)
            if own != new:
                raise PlannerConfigError(
                    f"planner.pools: pool {pool.name}: {key} stays {own or 'empty'} at run time,"
                    f" not {new or 'empty'}"
                )


def pools_of(pools: list[Pool], model: str) -> list[Pool]:
    """The pools that may serve a model."""
    return [pool for pool in pools if pool.model in ("", model)]


def _plain(text: str) -> str:
    """msgspec's message with the key in front."""
    match = re.search(r" - at `\$\.(\w+)", text)
    return f"planner.{match[1]}: {text[: match.start()]}" if match else text
