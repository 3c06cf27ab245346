"""Counters and retention state that an engine core reports."""

from dataclasses import dataclass, field

BY_RECENCY, BY_CLAIM = EVICTION_ORDERS = "recency", "claim"
RECENT = 0.05  # weight of one step in the moving mean


@dataclass
class EngineCounters:
    """Totals since the start, in tokens and requests; `step_s` is the mean of recent steps.

    `prefill_steps` are the steps that computed prompt tokens.
    """

    steps: int = 0
    prefill_steps: int = 0
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


def variance(count: int, total: int, squares: int) -> float:
    """The variance of `count` integers from their sum and the sum of their squares; 0 of none."""
    return (count * squares - total * total) / (count * count) if count else 0.0


@dataclass(frozen=True, kw_only=True)
class RetentionState:
    """Retention on one rank now; `outcomes` counts explicit directives since the start.

    `charged_blocks` are charged to the budgets of tenants. Since the start, `evicted` counts
    evicted blocks by what ordered them.
    """

    rank: int
    sessions: int
    pins: int
    charged_blocks: int
    outcomes: dict[str, int]
    evicted: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LedgerCounts:
    """The KV events of one rank since the start.

    `kept` counts blocks that reached the index, by tier, `dropped` those that could not, by reason
    (see `CacheLedger`) and tier, `unplaced` those that wait now for an event that says what
    precedes them. `malformed` counts messages that could not be decoded, with the last error,
    `lost` those that never arrived.
    `odd_size` is the last size of dropped blocks, `block_size` that of the model. `limits` names
    what the index cannot know of this engine (see `EventDecoder`).
    """

    rank: int
    block_size: int
    kept: list[int]
    dropped: dict[str, list[int]] = field(default_factory=dict)
    unplaced: int = 0
    malformed: int = 0
    last_error: str = ""
    lost: int = 0
    odd_size: int = 0
    limits: list[str] = field(default_factory=list)
