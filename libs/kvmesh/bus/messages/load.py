"""Load of one rank, as its engine reports it."""

from msgspec import Struct


class Load(Struct, frozen=True, kw_only=True):
    """Forward-pass metrics of one rank. Blocks and tokens now; counters since the start.

    `step_s` is the mean of the last steps. `busy_s` is the time in steps, 0 where the engine does
    not tell it, and `computed_tokens` the prompt tokens computed, both since the start.
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
