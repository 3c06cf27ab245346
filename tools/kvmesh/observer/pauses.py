"""The pauses between the turns of a session: their reason in words, and their length. Pure."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from kvmesh.bus.messages import Outcome

UNKNOWN = "–"


def wait_text(waits_for: Sequence[str]) -> str:
    """The reason of a pause, as `Outcome.waits_for` names it."""
    match list(waits_for):
        case []:
            return UNKNOWN
        case ["tool", *labels] if labels:
            return " ".join(labels)
        case ["human", *more]:
            return f"user ({' '.join(more).replace('_', ' ')})" if more else "user"
        case ["end"]:
            return "nothing"
        case labels:
            return " ".join(labels)


def pauses(ends: Iterable[float], arrivals: Iterable[float]) -> list[float | None]:
    """Seconds from each end to the next arrival in the session; None if none follows."""
    ordered = sorted(arrivals)
    found: list[float | None] = []
    for end in ends:
        following = bisect_left(ordered, end)
        found.append(ordered[following] - end if following < len(ordered) else None)
    return found


def pauses_after(turns: Sequence[Outcome]) -> list[float | None]:
    """The pause in seconds after each turn of a session; None if no turn follows it."""
    return pauses((t.time for t in turns), (t.time - t.total_s for t in turns))
