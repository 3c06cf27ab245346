"""Requests that wait until a worker has loaded their adapter (ADR 60)."""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from kvmesh.bus.messages import Placement, RouteRequest, adapter_name
from kvmesh.router.errors import NoWorkers
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.waiting.free_capacity import lane_of
from kvmesh.router.waiting.ticket import Ticket

LOOK_S = 0.5


class _Waiting(NamedTuple):
    ticket: Ticket
    adapter: str
    since: float
    lane: str  # the same of all requests with equal constraints


class AdapterWaits:
    """The tickets of one router whose adapter no worker has that may run them."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._waiting: dict[str, _Waiting] = {}
        self._seen_version = -1
        self._looked_at = self._wanted_at = -inf

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: str) -> bool:
        return request in self._waiting

    @property
    def tickets(self) -> list[Ticket]:
        return [each.ticket for each in self._waiting.values()]

    def take_wanted(self, now: float) -> list[tuple[str, Placement]]:
        """The adapters that are waited for, once for each of their requests' constraints.

        None more often than every LOOK_S seconds: for each, the caller looks at all workers.
        """
        if 0 <= now - self._wanted_at < LOOK_S:
            return []
        self._wanted_at = now
        return [(each.adapter, each.ticket.request.placement) for _, each in self._lanes()]

    def begin(self, ticket: Ticket, now: float) -> bool:
        """Let a ticket wait if its adapter is missing, and some worker may load it; else False."""
        request, core = ticket.request, self._core
        adapter = request.adapter
        if adapter is None or request.prefetch is not None:
            return False
        if len(self._waiting) >= core.settings.queue_limit or self._is_loaded(request):
            return False
        if not core.adapters.may_load(adapter, request.placement, now):
            return False
        self._waiting[request.request] = _Waiting(ticket, adapter, now, lane_of(request))
        return True

    def drop(self, request: str) -> Ticket | None:
        found = self._waiting.pop(request, None)
        return None if found is None else found.ticket

    def take_due(self, now: float) -> list[Ticket]:
        """Take the tickets whose adapter is loaded now."""
        if not self._waiting or self._core.table.version == self._seen_version:
            return []
        self._seen_version = self._core.table.version
        loaded = {lane for lane, each in self._lanes() if self._is_loaded(each.ticket.request)}
        due = [each for each in self._waiting.values() if each.lane in loaded]
        for each in due:
            del self._waiting[each.ticket.request.request]
            waited_s, name = now - each.since, adapter_name(each.adapter)
            each.ticket.note = f"waited {waited_s:.2f} s until a worker had loaded {name}"
        return [each.ticket for each in due]

    def take_hopeless(self, now: float) -> Iterator[tuple[Ticket, NoWorkers]]:
        """Take the tickets that have waited for long enough, or for which no worker is left."""
        adapters, longest = self._core.adapters, self._core.settings.adapter_wait_s
        hopeless = self._hopeless(now)
        for name, each in list(self._waiting.items()):
            late = now - each.since >= longest
            if late or each.lane in hopeless:
                del self._waiting[name]
                within = f" within {longest:g} s" if late else ""
                reason = adapters.reason(each.adapter)
                text = f"no worker has loaded the adapter {adapter_name(each.adapter)!r}{within}"
                yield each.ticket, NoWorkers(f"{text}: {reason}" if reason else text, unmet=True)

    def _hopeless(self, now: float) -> set[str]:
        """The lanes that no worker is left for; looks at all workers, so only now and then."""
        if 0 <= now - self._looked_at < LOOK_S:
            return set()
        self._looked_at = now
        return {
            lane
            for lane, each in self._lanes()
            if not self._core.adapters.may_load(each.adapter, each.ticket.request.placement, now)
            and not self._is_loaded(each.ticket.request)
        }

    def _lanes(self) -> Iterator[tuple[str, _Waiting]]:
        """One of the requests with equal constraints, for each of these."""
        return iter({each.lane: each for each in self._waiting.values()}.items())

    def _is_loaded(self, request: RouteRequest) -> bool:
        return len(self._core.table.eligible(request.placement, request.adapter, "all")) > 0
