"""Load of one data-parallel rank."""

from msgspec import Struct


class Load(Struct, frozen=True, kw_only=True):
    """Load and counters of one rank. Blocks and waiting tokens are current; counters since start.

    `step_s` is the mean duration of the latest steps. `busy_s` is the total time in steps, 0 if the
    engine does not report it; `computed_tokens` counts computed prompt tokens.
    """

    instance: str
    rank: int
    running: int
    waiting: int
    active_blocks: int
    cached_blocks: int
    total_blocks: int
    prefill_tokens: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests: int
    preemptions: int = 0
    aborted: int = 0
    step_s: float = 0.0
    busy_s: float = 0.0
    computed_tokens: int = 0
