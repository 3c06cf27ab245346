"""The starts of workers as rows of the dashboard."""

from kvmesh.bus.messages import Instance, Phase, Role, Starting, StartSource
from kvmesh.dashboard.state.starts import START_VIEW, worker_starts


def test_starts_are_told_by_phase() -> None:
    starting = Starting(
        instance="late-1",
        model="m",
        engine="torch",
        phase="weights",
        since=10.0,
        started=0.0,
        phases=[Phase("weights", 1.0), Phase("imports", 2.5)],
    )
    card = Instance(
        instance="w-1",
        role=Role.WORKER,
        name="w",
        version="",
        started=0.0,
        startup_s=3.21,
        phases=[Phase("imports", 2.0), Phase("engine", 1.21)],
        sources=[
            StartSource("weights", "disk", 10),
            StartSource("weights", "workers", 2048),
            StartSource("code", "compiled"),
        ],
        parked_for="m",
    )
    silent = Instance(instance="r-1", role=Role.ROUTER, name="r", version="", started=0.0)
    rows = worker_starts([card, silent], [starting], 12.0)
    texts = [
        [column.text(getattr(row, column.name)) for column in START_VIEW.columns] for row in rows
    ]
    assert texts == [
        ["late-1", "m", "starting", "imports 2.5 s, weights 3.0 s…", "", ""],
        [
            *("w-1", "m", "3.2 s", "imports 2.0 s, engine 1.2 s"),
            *("workers 2.0 KiB, disk 10 B", "compiled"),
        ],
    ]
