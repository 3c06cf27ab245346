"""Units of times: Unix times, whose size shows theirs, and times that doubt theirs."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import inf, isfinite
from operator import attrgetter
from statistics import median

from kvmesh.workload.errors import Repairs
from kvmesh.workload.reading.options import MILLISECONDS, ReadOptions, TimeUnit
from kvmesh.workload.reading.rows import TraceRow

# Milliseconds of the years 2000 and 2100. Offsets as large are longer than any trace.
FIRST, LAST = 0.946e12, 4.103e12
# Beyond these bounds the unit of times is doubtful, if there are more than SOME of them: requests
# per second, milliseconds between requests, of waits, and per token of answers.
SOME = 10
MANY = 10_000  # rows that show a median
FAST, SLOW = 1000, 1e5
WAITS, ANSWERS = (10.0, 9e5), (0.2, 1e4)
ANOTHER = "if the unit is another, --time-unit names it, or convert the fields that name theirs"


def rescale_unix_times(
    rows: list[TraceRow], options: ReadOptions, unit: TimeUnit, repairs: Repairs
) -> None:
    """Scale times that were read in `unit` if they are Unix times of another; states so.

    Each file has a unit of its own. Without effect where `--time-unit` names the unit.
    """
    if options.time_unit is not None:
        return
    scales = unix_scales(rows, unit, repairs)
    if all(scale == 1.0 for scale in scales.values()):
        return
    for row in rows:
        scale = scales[row.file]
        row.time = None if row.time is None else row.time * scale
        row.end = None if row.end is None else row.end * scale


def unix_scales(
    rows: list[TraceRow], unit: TimeUnit, repairs: Repairs, option: bool = True
) -> dict[int, float]:
    """The factor of each file for times that were read in `unit`, see `unix_scale`."""
    first: dict[int, float] = {}
    for file, members in groupby(rows, key=attrgetter("file")):
        times = (row.time for row in members if row.time is not None and isfinite(row.time))
        earliest = min(times, default=inf)
        first[file] = min(earliest, first.get(file, earliest))
    return {file: unix_scale([time], unit, repairs, option) for file, time in first.items()}


def unix_scale(
    times: Iterable[float | None], unit: TimeUnit, repairs: Repairs, option: bool = True
) -> float:
    """The factor for times that were read in `unit`, see `rescale_unix_times`.

    `option`: `--time-unit` sets the unit.
    """
    first = min((time for time in times if time is not None and isfinite(time)), default=0.0)
    first /= MILLISECONDS[unit]
    fitting = [name for name, size in MILLISECONDS.items() if FIRST <= first * size < LAST]
    if not fitting or fitting[0] == unit:
        return 1.0
    another = " (--time-unit names another)" if option else ""
    repairs.assume(f"times are read as Unix times in {fitting[0]}, by their size{another}")
    return MILLISECONDS[fitting[0]] / MILLISECONDS[unit]


def note_doubtful_units(rows: Sequence[TraceRow], times: Sequence[float], repairs: Repairs) -> None:
    """State which times of a trace are too short or too long for a server or its clients.

    `times` are the finite ones of the rows.
    """
    note_doubtful_pace(times, repairs)
    sample = rows[:: len(rows) // MANY + 1]
    note_doubtful_waits([row.delay for row in sample if row.delay > 0], repairs)
    spans = [
        (row.end - row.time) / row.output_length
        for row in sample
        if row.end is not None and row.time is not None and row.output_length
    ]
    _note_median("answers take {} ms per token in the median", spans, ANSWERS, repairs)


def note_doubtful_pace(times: Sequence[float], repairs: Repairs) -> None:
    """State that requests, at `times` in milliseconds, are too near or too far from each other."""
    count = len(times)
    if count <= SOME:
        return
    first = min(times)
    span = max(times) - first
    if not span:
        repairs.assume(f"all {count:,} requests with a time have the same one")
    elif count > FAST * span / 1e3 or (first < FIRST and span > SLOW * count):
        repairs.assume(f"{count:,} requests in {_rounded(span / 1e3)} s: {ANOTHER}")


def note_doubtful_waits(waits: Sequence[float], repairs: Repairs) -> None:
    """State that waits, in milliseconds, are too short or too long."""
    _note_median("waits between turns are {} ms in the median", waits, WAITS, repairs)


def _note_median(
    what: str, values: Sequence[float], bounds: tuple[float, float], repairs: Repairs
) -> None:
    positive = [value for value in values if value > 0]
    if len(positive) > SOME and not bounds[0] <= (middle := median(positive)) <= bounds[1]:
        repairs.assume(f"{what.format(_rounded(middle))}: {ANOTHER}")


def _rounded(value: float) -> str:
    """A number with three digits, without an exponent unless it is tiny."""
    return f"{float(f'{value:.3g}'):,.15g}"
