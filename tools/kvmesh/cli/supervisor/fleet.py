"""The workers that `kvmesh up` starts and stops at run time; no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvmesh.bus.messages import DesiredFleet, FleetReport
from kvmesh.cli.supervisor.plan import ProcessSpec, WorkerGroup, worker_spec


@dataclass(frozen=True)
class FleetChange:
    """Processes to start, and names of those to stop."""

    start: list[ProcessSpec] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Member:
    pool: str
    number: int
    port: int


class Fleet:
    """The workers of `groups` by name, beginning with those that the mesh starts with.

    `first_port` is the metrics port of the first worker, 0 for none; `most` bounds each pool.
    `revision` is that of the last wanted fleet, which `pass_over` and `apply` set. A name and a
    port become free once `ended` has been called.
    """

    def __init__(
        self,
        groups: Sequence[WorkerGroup],
        first_port: int,
        most: Mapping[str, int],
        environ: Mapping[str, str],
    ) -> None:
        self._groups = {group.pool: group for group in groups}
        self._first_port = first_port
        self._most = most
        self._environ = environ
        self._running: dict[str, _Member] = {}
        self._ending: dict[str, _Member] = {}
        self._error = ""
        self.revision = 0
        for group in groups:
            for _ in range(group.processes):
                self._start(group)

    def pass_over(self, desired: DesiredFleet) -> None:
        """Acknowledge a fleet that was wanted before this mesh started, without running it."""
        self.revision = desired.revision

    def apply(self, desired: DesiredFleet) -> FleetChange:
        """Change towards `desired`, as far as the pools and their bounds permit."""
        change, errors = FleetChange(), []
        for pool, wanted in desired.pools.items():
            group = self._groups.get(pool)
            if group is None:
                errors.append(f"no pool {pool}; kvmesh up runs {', '.join(self._groups)}")
                continue
            if wanted > self._most[pool]:
                errors.append(f"{wanted} workers of pool {pool} exceed {self._most[pool]}")
            missing = min(max(0, wanted), self._most[pool]) - len(self._names(pool))
            change.start.extend(self._start(group) for _ in range(missing))
            for name in self._last(pool, desired.stop)[: max(0, -missing)]:
                self._ending[name] = self._running.pop(name)
                change.stop.append(name)
        self._error = "; ".join(errors)
        self.revision = desired.revision
        return change

    def ended(self, name: str) -> None:
        """A stopped worker's process has ended."""
        self._ending.pop(name, None)

    def retired(self, name: str) -> bool:
        """Record that a worker rejects its settings and will not start again; False if unknown.

        The caller removes its process and then calls `ended`.
        """
        member = self._running.pop(name, None)
        if member is None:
            return False
        self._ending[name] = member
        self._error = f"{name} rejects its settings"
        return True

    def report(self) -> FleetReport:
        """The running and starting workers of each pool."""
        names = {pool: self._names(pool) for pool in self._groups}
        return FleetReport(
            revision=self.revision,
            pools={pool: len(workers) for pool, workers in names.items()},
            error=self._error,
            workers=names,
        )

    def _names(self, pool: str) -> list[str]:
        """The running workers of a pool by number."""
        members = [(m.number, name) for name, m in self._running.items() if m.pool == pool]
        return [name for _, name in sorted(members)]

    def _last(self, pool: str, stop: Sequence[str]) -> list[str]:
        """The running workers in the order in which they stop: those named, then from the end."""
        names = self._names(pool)
        named = [name for name in dict.fromkeys(stop) if name in names]
        return [*named, *(name for name in reversed(names) if name not in named)]

    def _start(self, group: WorkerGroup) -> ProcessSpec:
        """Add a worker with the lowest free number and port."""
        members = [*self._running.values(), *self._ending.values()]
        numbers = {m.number for m in members if m.pool == group.pool}
        ports = {m.port for m in members}
        number = next(n for n in count() if n not in numbers)
        port = next(p for p in count(self._first_port) if p not in ports) if self._first_port else 0
        spec = worker_spec(group, number, port, self._environ)
        self._running[spec.name] = _Member(group.pool, number, port)
        return spec
