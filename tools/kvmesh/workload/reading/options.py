"""Options of reading a trace, the same in every command."""

from typing import Literal, TypeAlias

from msgspec import Struct

Turns: TypeAlias = Literal["whole", "delta"]
TimeUnit: TypeAlias = Literal["ns", "us", "ms", "s"]
MILLISECONDS: dict[TimeUnit, float] = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}


class ReadOptions(Struct, frozen=True, kw_only=True):
    """Overrides of the facts that a file does not state; None is the default of its format.

    `turns`: later rows of a session hold the whole prompt, or what it adds to the turn before.
    `trace_block_size`: tokens per block id. `begin_s` and `end_s`: the part of the trace to keep,
    in seconds after its first request. `max_wait_s`: the longest wait between two turns.
    """

    turns: Turns | None = None
    time_unit: TimeUnit | None = None
    trace_block_size: int | None = None
    begin_s: float = 0.0
    end_s: float | None = None
    max_wait_s: float | None = None

    def milliseconds(self, unit: TimeUnit) -> float:
        """Milliseconds per unit of time of a format that counts in `unit`."""
        return MILLISECONDS[self.time_unit or unit]
