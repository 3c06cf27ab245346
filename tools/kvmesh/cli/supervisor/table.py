"""Live table of `kvmesh up` in a terminal: processes, and the load of the workers."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvmesh.bus.errors import BusError, cause
from kvmesh.cli.supervisor.process import SupervisedProcess
from kvmesh.cli.supervisor.restart_policy import ProcessState
from kvmesh.runtime.quantities import duration
from kvmesh.terminal.tables import FittedTable, columns

if TYPE_CHECKING:
    from kvmesh.bus.client import Bus
    from kvmesh.bus.messages import Load
    from kvmesh.cli.supervisor.mesh_view import MeshView
    from kvmesh.cli.supervisor.startup import StartupGuide

log = logging.getLogger(__name__)
REFRESH_S = 0.5
LOAD = ("running", "waiting", "KV in use")
COLOURS = {
    ProcessState.STARTING: "yellow",
    ProcessState.RUNNING: "green",
    ProcessState.WAITING: "red",
    ProcessState.STOPPING: "yellow",
    ProcessState.STOPPED: "dim",
}


class LiveTable:
    """A table at the bottom of the terminal, below the log lines that `emit` prints."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._loads: dict[str, dict[int, Load]] = {}  # by process name, then by rank

    def emit(self, text: str) -> None:
        self._console.print(Text.from_ansi(text), soft_wrap=True)

    async def show(self, processes: Iterable[SupervisedProcess], guide: "StartupGuide") -> None:
        """Update the table until cancelled."""
        followed = False
        with self._live:
            while True:
                if guide.view is not None and not followed:
                    followed = await self._follow_loads(guide.view.bus)
                now = asyncio.get_running_loop().time()
                table = render(processes, guide.view, self._loads, now)
                self._live.update(table, refresh=True)
                await asyncio.sleep(REFRESH_S)

    async def _follow_loads(self, bus: "Bus") -> bool:
        from kvmesh.bus.discovery.worker_reports import follow_loads

        try:
            await follow_loads(bus, self._on_load)
        except BusError as error:
            log.debug("the table shows no loads yet: %s", cause(error))
            return False
        return True

    def _on_load(self, load: "Load") -> None:
        ranks = self._loads.setdefault(load.instance.rpartition("-")[0], {})
        if any(known.instance != load.instance for known in ranks.values()):
            ranks.clear()
        ranks[load.rank] = load


def render(
    processes: Iterable[SupervisedProcess],
    view: "MeshView | None",
    loads: "Mapping[str, Mapping[int, Load]]",
    now: float,
) -> FittedTable:
    """The table at monotonic time `now`."""
    routable = view.routable if view else set()
    headings = ("process", "state", "pid", "up", "restarts", *LOAD)
    table = FittedTable(columns(*headings, hide=("pid", "up", "KV in use", "restarts", *LOAD)))
    for process in processes:
        record, name = process.record, process.spec.name
        running = record.state is ProcessState.RUNNING
        ready = running and name in routable
        table.add_row(
            name,
            Text("ready" if ready else record.state, COLOURS[record.state]),
            str(record.pid or "–"),
            duration(now - record.since) if running else "–",
            str(record.restarts),
            *(describe(loads[name].values()) if running and name in loads else ()),
        )
    return table


def describe(loads: "Collection[Load]") -> tuple[str, str, str]:
    """Running and waiting requests, and share of blocks in use, of a worker's ranks."""
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
    blocks = max(1, sum(load.total_blocks for load in loads))
    active = sum(load.active_blocks for load in loads) / blocks
    return str(running), str(waiting), f"{active:.0%}"
