"""The connector `command`: a program of the operator's own starts and stops workers."""

import shlex
from collections.abc import Sequence

import msgspec

from kvmesh.planner.connectors.interface import ConnectorError, PoolState
from kvmesh.planner.connectors.program import run_program
from kvmesh.planner.errors import PlannerConfigError


class _PrintedPool(msgspec.Struct):
    """A pool in the output of `state`."""

    wanted: int
    workers: list[str] = []


_decoder = msgspec.json.Decoder(dict[str, int | _PrintedPool])


class CommandConnector:
    """Runs `PROGRAM scale POOL=N … [--stop NAME …]` and `PROGRAM state`, without a shell.

    `command` is the program with its first arguments, quoted as for a shell. `state` prints a JSON
    object: for each pool the number of workers, or `{"wanted": N, "workers": [NAME, …]}`. Each run
    has `timeout_s` seconds. Raises PlannerConfigError for an unusable `command`.
    """

    chooses = True

    def __init__(self, command: str, timeout_s: float) -> None:
        try:
            self._argv = tuple(shlex.split(command))
        except ValueError as error:
            raise PlannerConfigError(f"planner.command: {error}") from error
        if not self._argv:
            raise PlannerConfigError("the connector command needs planner.command")
        self._timeout_s = timeout_s

    async def open(self) -> None:
        """Run `state` once; raises ConnectorError."""
        await self.state()

    async def state(self) -> dict[str, PoolState]:
        """Run `state`; raises ConnectorError, also for output of another form."""
        output = await run_program((*self._argv, "state"), self._timeout_s)
        try:
            printed = _decoder.decode(output)
        except msgspec.MsgspecError as error:
            name = self._argv[0]
            raise ConnectorError(f"{name} state printed no valid JSON object: {error}") from error
        return {
            pool: PoolState(each)
            if isinstance(each, int)
            else PoolState(each.wanted, tuple(each.workers))
            for pool, each in printed.items()
        }

    async def scale(self, pools: dict[str, int], stop: Sequence[str] = ()) -> None:
        """Run `scale`, which must be idempotent; raises ConnectorError."""
        numbers = [f"{pool}={number}" for pool, number in pools.items()]
        stopped = ["--stop", *stop] if stop else []
        await run_program((*self._argv, "scale", *numbers, *stopped), self._timeout_s)

    async def close(self) -> None:
        """Nothing to release."""
