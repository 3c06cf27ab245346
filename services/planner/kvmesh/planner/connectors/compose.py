"""The connector `compose`: each pool is a service of a Docker Compose file."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvmesh.planner.connectors.interface import ConnectorError, PoolState
from kvmesh.planner.connectors.program import run_program
from kvmesh.planner.core.pools import Pool

ENDED = ("exited", "dead", "removing")


class _Container(msgspec.Struct, rename="pascal"):
    """A container as `docker compose ps` prints it, as far as it is used."""

    service: str
    state: str = "running"


_one = msgspec.json.Decoder(_Container)
_several = msgspec.json.Decoder(list[_Container])


class ComposeConnector:
    """Scales services with the program `docker`; the target of a pool is a service's name.

    Compose removes the containers with the highest numbers, and a container's name is not its
    worker's: this connector neither chooses nor knows names. `docker compose up` returns only after
    the removed containers have ended, so `timeout_s` must exceed their `stop_grace_period`.
    """

    chooses = False

    def __init__(self, file: Path, pools: Sequence[Pool], timeout_s: float) -> None:
        # a service with a profile is otherwise unknown to some of the subcommands
        self._compose = ("docker", "compose", "-f", str(file), "--profile", "*")
        self._file = file
        self._services = {pool.name: pool.target or pool.name for pool in pools}
        self._timeout_s = timeout_s

    async def open(self) -> None:
        """Check that Docker runs and that the file has the services; raises ConnectorError."""
        output = await self._run("config", "--services")
        known = set(output.decode(errors="replace").split())
        if missing := sorted(set(self._services.values()) - known):
            raise ConnectorError(
                f"{self._file} has no service {', '.join(missing)}", permanent=True
            )
        await self.state()

    async def state(self) -> dict[str, PoolState]:
        """The number of containers of each service; raises ConnectorError."""
        output = await self._run("ps", "--format", "json")
        try:
            found = Counter(c.service for c in _containers(output) if c.state not in ENDED)
        except msgspec.MsgspecError as error:
            raise ConnectorError(f"docker compose ps printed unexpected JSON: {error}") from error
        return {pool: PoolState(found[service]) for pool, service in self._services.items()}

    async def scale(self, pools: dict[str, int], stop: Sequence[str] = ()) -> None:
        """Create or remove containers of the pools' services only; raises ConnectorError."""
        services = {self._service(pool): number for pool, number in pools.items()}
        numbers = [f"--scale={service}={number}" for service, number in services.items()]
        await self._run("up", "--detach", "--no-recreate", "--no-deps", *numbers, *services)

    async def close(self) -> None:
        """Nothing to release."""

    def _service(self, pool: str) -> str:
        try:
            return self._services[pool]
        except KeyError:
            raise ConnectorError(f"unknown pool {pool}", permanent=True) from None

    async def _run(self, *arguments: str) -> bytes:
        return await run_program((*self._compose, *arguments), self._timeout_s)


def _containers(output: bytes) -> Iterator[_Container]:
    """Compose prints one object a line; before version 2.21 it printed one list."""
    for line in output.splitlines():
        if line.startswith(b"["):
            yield from _several.decode(line)
        elif line.strip():
            yield _one.decode(line)
