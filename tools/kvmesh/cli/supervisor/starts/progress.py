"""Signs of progress of processes that start, and the lines that tell of them; no I/O."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvmesh.bus.messages import Starting
from kvmesh.runtime.quantities import duration

MOST_NAMED = 8


class AwaitedStart(NamedTuple):
    """A process that has not joined: the phase that it reports, empty if none, and its seconds.

    `total_s` counts from the start of the process.
    """

    name: str
    phase: str
    phase_s: float
    total_s: float


class _Heard(NamedTuple):
    instance: str
    phase: str
    since: float
    at: float


class StartProgress:
    """The phases of processes that start, and the last sign of progress of each, by name.

    A sign is the start of the process, a phase that it enters, and a line of its output. Times are
    monotonic seconds.
    """

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._signs: dict[str, float] = {}
        self._warned: set[str] = set()

    def on_starting(self, starting: Starting, now: float, clock: float) -> bool:
        """Take a worker's report, at Unix time `clock`; True if it has entered another phase."""
        name = starting.instance.rpartition("-")[0]
        since = now - max(clock - starting.since, 0.0)
        before = self._heard.get(name)
        self._heard[name] = _Heard(starting.instance, starting.phase, since, now)
        if before is not None and before[:2] == (starting.instance, starting.phase):
            return False
        self.sign(name, now)
        return True

    def sign(self, name: str, now: float) -> None:
        """Note that a process makes progress."""
        self._signs[name] = now
        self._warned.discard(name)

    def has_joined(self, name: str, since: float, instances: Collection[str]) -> bool:
        """True if the run of a process since that time has a card: one of `instances` of its name.

        The card of an earlier run stays until its lease lapses.
        """
        heard = self._heard.get(name)
        if heard is None or heard.at <= since:
            return bool(instances)
        return heard.instance in instances

    def awaited(self, started: Mapping[str, float], now: float) -> list[AwaitedStart]:
        """The starts of the processes that have not joined, by the times at which they started."""
        found = []
        for name, since in started.items():
            heard = self._heard.get(name)
            known = heard is not None and heard.at > since  # else it is of an earlier run
            phase, phase_s = (heard.phase, now - heard.since) if heard and known else ("", 0.0)
            found.append(AwaitedStart(name, phase, phase_s, now - since))
        return found

    def stalled(
        self, started: Mapping[str, float], limit_s: float, now: float
    ) -> list[AwaitedStart]:
        """Those without a sign of progress for `limit_s`; each is returned once until the next."""
        found = [
            each
            for each in self.awaited(started, now)
            if now - max(self._signs.get(each.name, 0.0), started[each.name]) > limit_s
            and each.name not in self._warned
        ]
        self._warned.update(each.name for each in found)
        return found


def describe_starts(awaited: Sequence[AwaitedStart], other: str = "") -> str:
    """The processes that a mesh waits for with their phases; `other` is a further thing."""
    named = [_text(each) for each in awaited[:MOST_NAMED]]
    if len(awaited) > MOST_NAMED:
        named.append(f"{len(awaited) - MOST_NAMED} more")
    return ", ".join([*named, *([other] if other else [])])


def _text(start: AwaitedStart) -> str:
    if not start.phase:
        return f"{start.name} (no report yet, {_time(start.total_s)})"
    return f"{start.name} ({start.phase} for {_time(start.phase_s)} of {_time(start.total_s)})"


def _time(seconds: float) -> str:
    """`9s`, `3m05s`, `1h03m`: to the second as long as a user waits by it."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02}s" if 0 < minutes < 60 else duration(int(seconds))
