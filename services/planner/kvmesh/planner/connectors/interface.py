"""The interface of connectors: each starts and stops workers in one kind of place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class ConnectorError(Exception):
    """The place where workers run refused a change or cannot be reached; the message says why.

    `permanent`: the same call fails again until someone changes the place or the settings.
    """

    def __init__(self, message: str, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


@dataclass(frozen=True)
class PoolState:
    """A pool as the place where it runs reports it.

    `wanted` is the number of workers that the place keeps running, whoever set it; `workers` are
    the names of those it runs or starts, the next one that it would remove of its own choice at the
    end; empty if it does not know names.
    """

    wanted: int
    workers: tuple[str, ...] = ()


class Connector(Protocol):
    """Starts and stops the workers of pools. No call lasts longer than the connector's timeout.

    `chooses`: `scale` can stop the workers named in `stop`; otherwise the place removes workers in
    its own order, which `state` shows.
    """

    chooses: bool

    async def open(self) -> None:
        """Check that the place can be reached; raises ConnectorError."""
        ...

    async def state(self) -> dict[str, PoolState]:
        """The pools as they are, without those that the place does not report.

        Raises ConnectorError.
        """
        ...

    async def scale(self, pools: dict[str, int], stop: Sequence[str] = ()) -> None:
        """Set the number of workers of each of `pools`; return once the place has accepted it.

        Other pools stay as they are. The workers named in `stop` end first where a pool shrinks. A
        worker that is stopped gets SIGTERM: it drains, and what it has not finished migrates.
        Idempotent. Raises ConnectorError.
        """
        ...

    async def close(self) -> None:
        """Release connections; workers keep running."""
        ...
