"""Checks of the router's settings beyond the schema, and the objects they describe."""

import math

from kvmesh.bus.messages import Thresholds
from kvmesh.router.errors import RouterConfigError
from kvmesh.router.policies.registry import make_policy
from kvmesh.router.scoring.cost import LINEAR_WEIGHT, CostModel
from kvmesh.settings.schema import RouterSettings


def check_settings(settings: RouterSettings) -> None:
    """Raise RouterConfigError naming the key and the reason if the settings are invalid."""
    for key in settings.__struct_fields__:
        value = getattr(settings, key)
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if isinstance(number, float) and not (math.isfinite(number) and number >= 0):
                raise RouterConfigError(key, f"{number} is not a finite number of at least 0")
    for key in ("overlap_credits", "prefill_credits", "decode_credits"):
        if max(getattr(settings, key)) > 1:
            raise RouterConfigError(key, "a credit above 1 is more than a block's own prefill")
    if settings.kv_events and settings.predicted_ttl_s > settings.sequence_ttl_s:
        raise RouterConfigError("predicted_ttl_s", "must not be above sequence_ttl_s")
    if settings.rescore_s > settings.starvation_s:
        raise RouterConfigError("rescore_s", "must not be above starvation_s")
    fair_weights(settings)
    make_policy(settings.policy, settings)


def cost_model(
    settings: RouterSettings, overlap_credits: list[float] | None = None, computes: bool = True
) -> CostModel:
    """The cost model of the settings, with other credits if given.

    Without `computes` it is that of ranks that get a prompt's blocks from others: always linear.
    """
    weight = settings.prefill_weight
    first, second, third, fourth = overlap_credits or settings.overlap_credits
    return CostModel(
        credits=(first, second, third, fourth),
        prefill_weight=weight if weight is not None or computes else LINEAR_WEIGHT,
        request_weight=settings.request_weight,
        credit_decay=settings.credit_decay,
        temperature=settings.temperature,
    )


def thresholds(settings: RouterSettings) -> Thresholds:
    """The busy thresholds of the settings, which hold until `kvmesh model busy` sets others."""
    return Thresholds(
        blocks=settings.busy_blocks,
        blocks_share=settings.busy_blocks_share,
        prefill_tokens=settings.busy_prefill_tokens,
    )


def fair_weights(settings: RouterSettings) -> dict[str, float]:
    """Weight by fair class; an unlisted class has weight 1."""
    weights = {}
    for entry in settings.fair_weights:
        name, _, text = entry.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not name or not (math.isfinite(weight) and weight > 0):
            raise RouterConfigError(
                "fair_weights", f"{entry!r} is not NAME=WEIGHT with a weight above 0"
            )
        weights[name] = weight
    return weights
