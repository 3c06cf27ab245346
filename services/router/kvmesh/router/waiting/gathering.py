"""Requests of one instant, which are placed together.

Placed one by one in the order of their arrival, a request without cached blocks takes the rank
that a later one has its prefix on. So those that have the most to lose are placed first.
"""

import numpy as np

from kvmesh.router.scoring.overlaps import TIERS, Overlaps
from kvmesh.router.waiting.ticket import Ticket

MOST_GATHERED = 64  # are placed without further delay


class Gathering:
    """Collects tickets for `span_s` seconds from the first one on, unless that one is alone."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._ends_at = 0.0
        self._tickets: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: str) -> bool:
        return any(ticket.request.request == request for ticket in self._tickets)

    def add(self, ticket: Ticket, now: float) -> None:
        if not self._tickets:
            self._ends_at = now if ticket.alone else now + self._span_s
        self._tickets.append(ticket)

    @property
    def tickets(self) -> list[Ticket]:
        return list(self._tickets)

    def drop(self, request: str) -> Ticket | None:
        for at, ticket in enumerate(self._tickets):
            if ticket.request.request == request:
                return self._tickets.pop(at)
        return None

    def take_due(self, now: float) -> list[Ticket]:
        """Take the tickets if their time is over, or if they are many."""
        tickets = len(self._tickets)
        due = tickets > 0 and (now >= self._ends_at or tickets >= MOST_GATHERED)
        return self.take() if due else []

    def take(self) -> list[Ticket]:
        """All tickets: by priority, then the longest cached prefix first, then the longest prompt.

        A prompt elsewhere than its prefix is computed again and evicts others; and a long one
        placed last would stop the answers of those that came before it.
        """
        tickets, self._tickets = self._tickets, []
        if len(tickets) > 1:
            tickets.sort(key=_order)
        return tickets


def _order(ticket: Ticket) -> tuple[int, int, int]:
    request = ticket.request
    priority = max(request.hints.strict_priority, 0)
    return -priority, -_most_cached(ticket.overlaps), -request.tokens


def _most_cached(overlaps: Overlaps | None) -> int:
    """The most leading blocks that a rank or node has, in any tier."""
    if overlaps is None or not overlaps.rows:
        return 0
    rows = np.frombuffer(overlaps.rows, np.uint32).reshape(-1, 1 + TIERS)
    return int(rows[:, 1:].sum(1).max())
