"""The turns of each session, and the sessions by their last use. Pure."""

from collections import OrderedDict
from collections.abc import Iterator
from math import inf

from kvmesh.dashboard.state.requests.seen import SeenRequest


class SessionLane:
    """The turns of one session within the window, in the order in which they were first seen."""

    __slots__ = ("_dropped", "_turns")

    def __init__(self) -> None:
        self._turns: dict[str, SeenRequest] = {}
        self._dropped = 0

    @property
    def turns(self) -> list[SeenRequest]:
        return list(self._turns.values())

    def latest(self) -> Iterator[SeenRequest]:
        """The turns, the last one first; there is always one."""
        return reversed(self._turns.values())

    @property
    def last(self) -> SeenRequest:
        return next(self.latest())

    @property
    def session(self) -> str:
        return self.last.session

    @property
    def tenant(self) -> str:
        """The tenant by its latest outcome; before the first one, the class of its requests."""
        ended = (turn for turn in self.latest() if turn.outcome is not None)
        return next(ended, self.last).tenant

    @property
    def last_use(self) -> float:
        """The end of the last turn, in Unix seconds; infinite while it runs."""
        last = self.last
        if last.outcome is not None:
            return last.outcome.time
        return last.arrived if last.state == "left" else inf

    def add(self, seen: SeenRequest) -> None:
        """Add a turn; a known one keeps its number."""
        if seen.request not in self._turns:
            self._turns[seen.request] = seen
            seen.turn = self._dropped + len(self._turns)

    def remove(self, seen: SeenRequest) -> bool:
        """Remove a turn; returns whether others are left."""
        if self._turns.pop(seen.request, None) is not None:
            self._dropped += 1
        return bool(self._turns)


class SessionLanes:
    """The lanes of all sessions, by their names that are unique over all tenants."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, SessionLane] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lanes)

    def add(self, seen: SeenRequest) -> None:
        """Add a turn to its session, if it has one; the session becomes the latest."""
        if name := seen.scoped_session:
            self._lanes.setdefault(name, SessionLane()).add(seen)
            self._lanes.move_to_end(name)

    def remove(self, seen: SeenRequest) -> None:
        """Remove a turn; a session without turns is forgotten."""
        name = seen.scoped_session
        if name in self._lanes and not self._lanes[name].remove(seen):
            del self._lanes[name]

    def tenant(self, seen: SeenRequest) -> str:
        """The tenant of a turn's session."""
        lane = self._lanes.get(seen.scoped_session)
        return seen.tenant if lane is None else lane.tenant

    def latest(self, since: float, find: str = "") -> Iterator[SessionLane]:
        """The lanes in use since the Unix time `since`, the latest first.

        `find` is a part of the session's or the tenant's name, in any case.
        """
        find = find.lower()
        for lane in reversed(self._lanes.values()):
            if lane.last_use < since:
                continue
            if not find or find in lane.session.lower() or find in lane.tenant.lower():
                yield lane

    def of(self, tenant: str, session: str) -> list[SeenRequest]:
        """The turns of a tenant's session with this name, as the tenant calls it."""
        lanes = (
            lane
            for lane in self._lanes.values()
            if lane.session == session and lane.tenant == tenant
        )
        return sorted((t for lane in lanes for t in lane.turns), key=lambda turn: turn.arrived)
