"""Requests of agents that rest, until the policy admits them (ADR 47)."""

from collections.abc import Iterator

from kvmesh.router.placement.policy_runner import PolicyRunner
from kvmesh.router.waiting.ticket import Ticket

ASK_AGAIN_S = 1e-4  # for each request but one that is not admitted: asking takes a part of it


class Resting:
    """The tickets that `policies` does not admit, in the order in which they came."""

    def __init__(self, policies: PolicyRunner) -> None:
        self._policies = policies
        self._tickets: dict[str, Ticket] = {}
        self._ask_again = 0.0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: str) -> bool:
        return request in self._tickets

    @property
    def tickets(self) -> list[Ticket]:
        return list(self._tickets.values())

    def add(self, ticket: Ticket) -> None:
        self._tickets[ticket.request.request] = ticket

    def drop(self, request: str) -> Ticket | None:
        return self._tickets.pop(request, None)

    def take_due(self, now: float) -> Iterator[Ticket]:
        """Take the tickets that are admitted now."""
        if not self._tickets or now < self._ask_again:
            return
        self._ask_again = now + ASK_AGAIN_S * (len(self._tickets) - 1)
        for request, ticket in list(self._tickets.items()):
            if self._policies.admits(ticket.request, now):
                del self._tickets[request]
                yield ticket
