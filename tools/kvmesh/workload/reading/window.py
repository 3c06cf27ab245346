"""Cuts a part of time out of a workload, and shortens its waits."""

from msgspec import structs

from kvmesh.runtime.quantities import counted
from kvmesh.workload.errors import Repairs, WorkloadError
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.reading.options import ReadOptions

# Seconds per output token of the answers before a request whose time is planned.
TOKEN_S = 0.02


def planned_starts(workload: Workload, token_s: float = 0.0) -> list[float]:
    """Seconds from the start to each round if an output token took `token_s` and nothing else."""
    starts: list[float] = []
    ends: list[float] = []
    for round_ in workload.rounds:
        start = max((ends[index] for index in round_.after), default=0.0) + round_.at_s
        starts.append(start)
        ends.append(start + round_.output_tokens * token_s)
    return starts


def adjusted(
    workload: Workload, starts: list[float], options: ReadOptions, repairs: Repairs
) -> Workload:
    """The workload between `begin_s` and `end_s` with waits of at most `max_wait_s` seconds.

    Raises WorkloadError if no request is left.
    """
    if options.begin_s or options.end_s is not None:
        workload = _cut(workload, starts, options)
    if options.max_wait_s is None:
        return workload
    most = options.max_wait_s
    longer = sum(bool(round_.after) and round_.at_s > most for round_ in workload.rounds)
    if longer:
        repairs.assume(f"shortened {counted(longer, 'wait')} to {most:g} s")
        rounds = [_shortened(round_, most) for round_ in workload.rounds]
        workload = structs.replace(workload, rounds=rounds)
    return workload


def _shortened(round_: Round, most: float) -> Round:
    if not round_.after or round_.at_s <= most:
        return round_
    return structs.replace(round_, at_s=most, approval_s=min(round_.approval_s, most))


def _cut(workload: Workload, starts: list[float], options: ReadOptions) -> Workload:
    """The rounds that start in the window; those that wait for none of them start on time."""
    end = float("inf") if options.end_s is None else options.end_s
    kept = [index for index, start in enumerate(starts) if options.begin_s <= start < end]
    if not kept:
        last = max(starts, default=0.0)
        raise WorkloadError(
            f"no request between {options.begin_s:g} and {end:g} s: the trace ends at {last:g} s"
        )
    origin = min(starts[index] for index in kept)
    number = {index: position for position, index in enumerate(kept)}
    sessions, places = _sessions(workload, kept)
    rounds: list[Round] = []
    for index in kept:
        round_ = workload.rounds[index]
        after = tuple(number[before] for before in round_.after if before in number)
        moved = structs.replace(round_, session=places[round_.session], after=after)
        if not after:
            moved = structs.replace(moved, at_s=starts[index] - origin, wait="", approval_s=0.0)
        rounds.append(moved)
    return structs.replace(workload, sessions=sessions, rounds=rounds)


def _sessions(workload: Workload, kept: list[int]) -> tuple[list[Session], dict[int, int]]:
    """The sessions of the kept rounds, and their new indices by the old ones."""
    used = sorted({workload.rounds[index].session for index in kept})
    places = {old: new for new, old in enumerate(used)}
    parents = [workload.sessions[old].parent for old in used]
    sessions = [
        structs.replace(workload.sessions[old], parent=None if p is None else places.get(p))
        for old, p in zip(used, parents, strict=True)
    ]
    return sessions, places
