"""Options of reading a trace, the same in every command."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from msgspec import Struct, field

Turns: TypeAlias = Literal["whole", "delta"]
TimeUnit: TypeAlias = Literal["ns", "us", "ms", "s"]
MILLISECONDS: dict[TimeUnit, float] = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
UNUSED = {
    "turns": "the rows of this trace have one meaning",
    "time_unit": "no time of this trace is a number whose unit is open",
    "trace_block_size": "no block ids of this trace lack the size of their blocks",
}


class ReadOptions(Struct, frozen=True, kw_only=True):
    """Overrides of the facts that a file does not state; None is the default of its format.

    `turns`: later rows of a session hold the whole prompt, or what it adds to the turn before.
    `trace_block_size`: tokens per block id. `begin_s` and `end_s`: the part of the trace to keep,
    in seconds after its first request. `max_wait_s`: the longest wait between two turns. `used`
    has the names of those of the first three that a reader has asked for.
    """

    turns: Turns | None = None
    time_unit: TimeUnit | None = None
    trace_block_size: int | None = None
    begin_s: float = 0.0
    end_s: float | None = None
    max_wait_s: float | None = None
    used: set[str] = field(default_factory=set)

    def milliseconds(self, unit: TimeUnit) -> float:
        """Milliseconds per unit of time of a format that counts in `unit`."""
        self.used.add("time_unit")
        return MILLISECONDS[self.time_unit or unit]

    def block_size(self, size: int) -> int:
        """Tokens per id of a format with `size` of them."""
        self.used.add("trace_block_size")
        return self.trace_block_size or size

    def moment(self, value: float | str, unit: TimeUnit) -> float:
        """Milliseconds of a number of a format that counts in `unit`, or of a date (see `date`)."""
        try:
            number = float(value)
        except ValueError:
            return date(str(value))
        return number * self.milliseconds(unit)

    def unused(self) -> Iterator[str]:
        """The options that had no effect on what was read, with the reason."""
        for name, reason in UNUSED.items():
            if getattr(self, name) is not None and name not in self.used:
                yield f"--{name.replace('_', '-')} changes nothing: {reason}"


def date(text: str) -> float:
    """Unix milliseconds of a date in ISO 8601; raises ValueError.

    It may have any number of digits; without a zone it is UTC.
    """
    try:
        time = datetime.fromisoformat(text.strip().replace(" UTC", "+00:00"))
    except ValueError as error:
        raise ValueError(f"{text!r} is neither a number nor a date in ISO 8601") from error
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1e3
