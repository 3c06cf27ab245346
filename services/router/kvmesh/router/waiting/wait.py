"""A way to wait for a placement or, once placed, for the turn of a prompt on its rank."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from kvmesh.router.waiting.ticket import Ticket

Due = TypeVar("Due", covariant=True)


class Wait(Protocol[Due]):
    """Keeps tickets of this router until their wait is over.

    The way to wait decides who enters, and what ends a wait: the time, the load, or an event of the
    active-sequence stream. A wait places, refuses and publishes nothing: `PlacementQueue` does.
    """

    def __len__(self) -> int:
        """Requests that wait here; in the common queue those of all routers."""
        ...

    def __contains__(self, request: str) -> bool:
        """True if a request of this router waits here."""
        ...

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets that wait here."""
        ...

    def drop(self, request: str) -> Ticket | None:
        """Forget a request that was cancelled, freed or refused; its ticket if it waited."""
        ...

    def take_due(self, now: float) -> Iterable[Due]:
        """Take those whose wait is over, in the order in which they go on."""
        ...
