"""Requests that wait while another one computes the prefix of their prompt (ADR 49).

A wait is bounded by the time in which another rank would compute the prompt: a request that waits
in vain loses no more time than it could have saved.
"""

from dataclasses import dataclass

from kvmesh.bus.messages import Candidate, Decision, PrefixWait, SeqAdd, SeqEvent, prefill_part
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.waiting.ticket import Ticket

LEAST_S = 0.1  # of computing the prefix: less is not worth a wait
MOST_WAITS = 3  # of one request
MARGIN_S = 1.0  # before a request's deadline
COMPUTED, LATE, LOST = "computed", "late", "lost"


@dataclass(slots=True, eq=False)
class _Wait:
    """A ticket that waits for the prefill of `leader` since a time, until another at most."""

    ticket: Ticket
    leader: str
    rank: Candidate
    blocks: int
    since: float
    until: float
    computed: bool = False


class PrefixWaits:
    """The tickets of one router that wait for a prefix, in the order in which they began to."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._waits: dict[str, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, request: str) -> bool:
        return request in self._waits

    @property
    def tickets(self) -> list[Ticket]:
        return [wait.ticket for wait in self._waits.values()]

    def begin(self, ticket: Ticket, decision: Decision, now: float) -> list[SeqAdd]:
        """Let a ticket wait if its rank is computing the prompt's prefix for another request.

        Returns the events for the replicas; none if the request is to be placed as decided. The
        ticket counts as load on its rank while it waits.
        """
        core, request = self._core, ticket.request
        rank = decision.prefill or decision.chosen
        slot = core.table.find_slot(rank.instance, rank.rank)
        if slot is None or request.prefetch is not None or len(ticket.prefix_waits) >= MOST_WAITS:
            return []
        prefills = core.prefills
        found = prefills.find(
            slot, decision.sequence_hashes, request.hints.priority, request.request
        )
        if found is None:
            return []
        leader, blocks = found
        if any(wait.request == leader.request for wait in ticket.prefix_waits):
            return []
        if not prefills.dominates(leader):
            return []  # behind others in the engine, it finds the prefix computed
        if blocks * core.table.block_size * prefills.token_s(slot) < LEAST_S:
            return []
        until = min(now + core.recompute_s(decision, rank), ticket.deadline - MARGIN_S)
        if until <= now:
            return []
        self._waits[request.request] = _Wait(ticket, leader.request, rank, blocks, now, until)
        return core.reserve(decision, leader.request, now)

    def apply(self, event: SeqEvent) -> None:
        """The prompt of a request may have been computed, perhaps on another rank than its."""
        if self._waits and self._core.ends_prefill(event):
            names = event.request, prefill_part(event.request)
            for wait in self._waits.values():
                if wait.leader in names:
                    wait.computed = True

    def drop(self, request: str) -> Ticket | None:
        wait = self._waits.pop(request, None)
        return None if wait is None else wait.ticket

    def take_due(self, now: float) -> list[Ticket]:
        """Take the tickets whose wait is over.

        If the request that computed has ended early, the first of those that wait for it, in any
        router, is the next to compute, and the others wait for that one. One that takes longer than
        expected is given up for all, but not one that a short prompt has no time to wait for.
        """
        successors: dict[str, str | None] = {}  # by leader, as many may wait for the same one
        waits = list(self._waits.values())
        over = [(wait, end) for wait in waits if (end := self._end(wait, now, successors))]
        for wait, end in over:
            request = wait.ticket.request.request
            del self._waits[request]
            wait.ticket.prefix_waits.append(
                PrefixWait(
                    request=wait.leader,
                    instance=wait.rank.instance,
                    worker=wait.rank.worker,
                    rank=wait.rank.rank,
                    blocks=wait.blocks,
                    seconds=now - wait.since,
                    end=end,
                )
            )
            self._core.withdraw(request)
        return [wait.ticket for wait, _ in over]

    def _end(self, wait: _Wait, now: float, successors: dict[str, str | None]) -> str:
        """The end of a wait; empty if it goes on. `successors` are those found so far."""
        prefills = self._core.prefills
        if wait.computed:
            return COMPUTED
        if now >= wait.until:
            if prefills.is_late(wait.leader, wait.blocks, now):
                self._core.give_up_prefill(wait.leader)
            return LATE
        if wait.leader in prefills or prefills.waits(wait.leader):
            return ""
        if wait.leader not in successors:
            successors[wait.leader] = prefills.successor(wait.leader)
        following = successors[wait.leader]
        if following is None or following in self._waits:
            return LOST
        wait.leader = following
        return ""
