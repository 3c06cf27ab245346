"""A place where workers run, as the suite of all connectors needs it."""

from collections.abc import Sequence
from typing import Protocol

from kvmesh.planner.connectors.interface import Connector
from kvmesh.planner.core.pools import Pool

POOLS = {"east": 1, "west": 2}  # the workers of each pool at the start of a test
TIMEOUT_S = 20.0


class Place(Protocol):
    """A stand-in that starts with the workers of POOLS.

    `changes` counts the changes that it was asked for. `silence` is part of the error after `cut`,
    and `cut_timeout_s` a timeout that suits a cut-off connector.
    """

    silence: str
    cut_timeout_s: float

    @property
    def changes(self) -> int: ...

    @property
    def pools(self) -> Sequence[Pool]: ...

    def connector(self, timeout_s: float = TIMEOUT_S) -> Connector:
        """A connector to this place."""
        ...

    async def start(self) -> None: ...

    async def running(self, pool: str) -> list[str]:
        """The names that the place gives to the workers that run and do not end."""
        ...

    async def set(self, pool: str, number: int) -> None:
        """Change a pool by hand."""
        ...

    async def cut(self) -> None:
        """Make the place unreachable."""
        ...

    async def close(self) -> None: ...
