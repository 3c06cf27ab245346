"""Counters and retention state that an engine core reports."""

from dataclasses import dataclass

RECENT = 0.05  # weight of one step in the moving mean


@dataclass
class EngineCounters:
    """Totals since the start, in tokens and requests; `step_s` is the mean of recent steps."""

    steps: int = 0
    busy_s: float = 0.0
    step_s: float = 0.0
    computed_tokens: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def count_steps(self, steps: int, seconds: float) -> None:
        """Record `steps` steps that took `seconds` in total."""
        self.steps += steps
        self.busy_s += seconds
        share = min(1.0, steps * RECENT) if self.step_s else 1.0
        self.step_s += share * (seconds / steps - self.step_s)


@dataclass(frozen=True, kw_only=True)
class RetentionState:
    """Retention on one rank now; `outcomes` counts explicit directives since the start.

    `charged_blocks` are charged to the budgets of tenants.
    """

    rank: int
    sessions: int
    pins: int
    charged_blocks: int
    outcomes: dict[str, int]
