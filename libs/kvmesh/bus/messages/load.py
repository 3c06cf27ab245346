"""Load of one data-parallel rank."""

from msgspec import Struct


class Load(Struct, frozen=True, kw_only=True):
    """Load and counters of one rank. Blocks and waiting tokens are current; counters since start.

    `step_s` is the mean duration of the latest steps. `busy_s` is the total time in steps, 0 if the
    engine does not report it; `computed_tokens` counts computed prompt tokens. A server's steps and
    their time are read together, less often than tokens are counted: compare reports with different
    `steps`.

    The batch: `decoding` sequences get a token per step; `decode_tokens` is the sum of their KV
    lengths in tokens, `decode_var` the variance. `waiting_tokens` is the part of `prefill_tokens`
    of the sequences in the queue, `waiting_var` the variance of their lengths. `prefill_steps`
    counts the steps that computed prompt tokens. Engines that return a stream per request count a
    request as decoding from its first token on, take the latest ones as waiting, and report no
    `prefill_steps` (vLLM does with `vllm.retention`). 0 is unknown.

    `load_ratio` is the time to load a block from the node's kvbm over the time to compute it.
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
    decoding: int = 0
    decode_tokens: int = 0
    decode_var: float = 0.0
    waiting_tokens: int = 0
    waiting_var: float = 0.0
    prefill_steps: int = 0
    load_ratio: float = 0.0
