"""Unix times, whose size shows their unit."""

from collections.abc import Iterable
from math import isfinite

from kvmesh.workload.errors import Repairs
from kvmesh.workload.reading.options import MILLISECONDS, ReadOptions, TimeUnit
from kvmesh.workload.reading.rows import TraceRow

# Milliseconds of the years 2000 and 2100. Offsets as large are longer than any trace.
FIRST, LAST = 0.946e12, 4.103e12


def rescale_unix_times(
    rows: list[TraceRow], options: ReadOptions, unit: TimeUnit, repairs: Repairs
) -> None:
    """Scale times that were read in `unit` if they are Unix times of another; states so.

    Without effect where `--time-unit` names the unit.
    """
    scale = unix_scale((row.time for row in rows), options, unit, repairs)
    if scale == 1:
        return
    for row in rows:
        row.time = None if row.time is None else row.time * scale
        row.end = None if row.end is None else row.end * scale


def unix_scale(
    times: Iterable[float | None], options: ReadOptions, unit: TimeUnit, repairs: Repairs
) -> float:
    """The factor for times that were read in `unit`, see `rescale_unix_times`."""
    first = min((time for time in times if time is not None and isfinite(time)), default=0.0)
    first /= MILLISECONDS[unit]
    fitting = [name for name, size in MILLISECONDS.items() if FIRST <= first * size < LAST]
    if options.time_unit is not None or not fitting or fitting[0] == unit:
        return 1.0
    repairs.assume(
        f"times are read as Unix times in {fitting[0]}, by their size (--time-unit names another)"
    )
    return MILLISECONDS[fitting[0]] / MILLISECONDS[unit]
