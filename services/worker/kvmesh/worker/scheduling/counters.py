"""What the core of an engine counts."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Since the start; tokens and requests."""

    steps: int = 0
    busy_s: float = 0.0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class RetentionState:
    """Retention on one rank now; `outcomes` count explicit directives since the start."""

    rank: int
    sessions: int
    pins: int
    kept_blocks: int
    outcomes: dict[str, int]
