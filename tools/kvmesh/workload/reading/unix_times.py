"""Unix times, whose size shows their unit."""

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
    times = [row.time for row in rows if row.time is not None and isfinite(row.time)]
    if options.time_unit is not None or not times:
        return
    first = min(times) / MILLISECONDS[unit]
    fitting = [name for name, size in MILLISECONDS.items() if FIRST <= first * size < LAST]
    if not fitting or fitting[0] == unit:
        return
    scale = MILLISECONDS[fitting[0]] / MILLISECONDS[unit]
    for row in rows:
        if row.time is not None:
            row.time *= scale
    repairs.assume(
        f"times are read as Unix times in {fitting[0]}, by their size (--time-unit names another)"
    )
