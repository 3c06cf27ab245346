"""Live table of `kvmesh up` in a terminal: processes, and the load of the workers."""

import asyncio
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvmesh.cli.supervisor.process import SupervisedProcess
from kvmesh.cli.supervisor.restart_policy import ProcessState
from kvmesh.runtime.quantities import duration
from kvmesh.terminal.tables import FittedTable, columns

if TYPE_CHECKING:
    from kvmesh.bus.messages import Load
    from kvmesh.cli.supervisor.mesh_view import MeshView
    from kvmesh.cli.supervisor.startup import StartupGuide

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

    def emit(self, text: str) -> None:
        self._console.print(Text.from_ansi(text), soft_wrap=True)

    async def show(self, processes: Iterable[SupervisedProcess], guide: "StartupGuide") -> None:
        """Update the table until cancelled."""
        with self._live:
            while True:
                now = asyncio.get_running_loop().time()
                self._live.update(render(processes, guide.view, now), refresh=True)
                await asyncio.sleep(REFRESH_S)


def render(
    processes: Iterable[SupervisedProcess], view: "MeshView | None", now: float
) -> FittedTable:
    """The table at monotonic time `now`."""
    loads = view.loads if view else {}
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
