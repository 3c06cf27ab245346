"""Options of the planner's decisions."""

from dataclasses import dataclass, field
from math import inf

from kvmesh.bus.messages import BATCH_CLASS
from kvmesh.planner.core.promises import Promise


@dataclass(frozen=True)
class PlanOptions:
    """Times in seconds. `promises` may be empty: `target` then says what to aim at.

    `disagg_tokens`: prompts with at least so many tokens to compute go to prefill workers.
    `batch_classes`: classes of requests that run in what is left.
    """

    promises: list[Promise] = field(default_factory=list)
    target: str = "latency"
    predictor: str = "seasonal"
    interval_s: float = 5.0
    window_s: float = 1800.0
    startup_s: float = 60.0
    up_cooldown_s: float = 0.0
    down_cooldown_s: float = 60.0
    max_devices: float = inf
    disagg_tokens: int = 2048
    zero_after_s: float = 300.0
    batch_classes: frozenset[str] = frozenset({BATCH_CLASS})
    manual_hold_s: float = 900.0
