"""Turns recorded requests with starts and ends into waits for one another."""

from kvmesh.workload.reading.rows import TraceRow


def follow(
    rows: list[TraceRow], rounding_ms: float = 0.0, overlapping_on_time: bool = False
) -> None:
    """Let each of a session's rows wait for the last one that had ended when it started.

    A row whose `delay` is negative waits as long as the recorded times say. `rounding_ms` is the
    precision of the times. Each row needs a time, an end and a name. With `overlapping_on_time`, a
    row that starts before the end of the one before it starts at its recorded time, as a capture.
    """
    rows.sort(key=lambda row: row.time or 0.0)
    ended: TraceRow | None = None
    last: TraceRow | None = None
    running: list[TraceRow] = []
    for row in rows:
        begin = row.time or 0.0
        still: list[TraceRow] = []
        for other in running:
            end = other.end or 0.0
            if end > begin + rounding_ms:
                still.append(other)
            elif ended is None or end >= (ended.end or 0.0):
                ended = other
        running = [*still, row]
        if ended is not None and (ended is last or not overlapping_on_time):
            row.wait_for = [ended.request_id or ""]
            if row.delay < 0 or ended is not last:
                row.delay = max(0.0, begin - (ended.end or 0.0))
        else:
            row.delay, row.wait = 0.0, ""
        last = row
