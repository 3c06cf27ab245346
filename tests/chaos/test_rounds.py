"""Hours of faults, one after another and two at once, and a table of what clients noticed.

`MINUTES=60 pytest -s -m soak tests/chaos/test_rounds.py` runs for an hour; `make soak` for a while.
"""

import asyncio
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import skewed
from support.mesh import Mesh
from support.nats import NatsServer
from support.traffic import Traffic, distinct_prompts

pytestmark = pytest.mark.soak
MINUTES = float(os.environ.get("MINUTES", "5"))
SEED = int(os.environ.get("ROUNDS_SEED", "1"))
PAUSE_S = 30.0  # of a stream, at most: a lease, and slow machines
FROZEN_S = 4.0
DISK_MB = 96
HOUR_S = 3600
WORKERS = ("worker-0", "worker-1", "worker-2")
ROLES = ("router-0", "router-1", "indexer-0", "indexer-1", *WORKERS, "frontend-1")


@dataclass
class Stage:
    """The mesh under test; clients use `frontend-0`, which is left alone."""

    nats: NatsServer
    mesh: Mesh
    folder: Path
    clock: Path | None
    random: random.Random
    disk: bool
    answers: dict[str, str] = field(default_factory=dict)


Round = Callable[[Stage], Awaitable[None]]


@dataclass
class Row:
    """Tries, requests, failures and the longest pause of one kind of fault."""

    tries: int = 0
    requests: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    pause_s: float = 0.0


def free(stage: Stage) -> list[str]:
    """The processes that may be attacked, in a random order, of which one worker is left out."""
    names = [name for name in ROLES if name != stage.random.choice(WORKERS)]
    stage.random.shuffle(names)
    return names


async def kill(stage: Stage) -> None:
    name = free(stage)[0]
    stage.mesh.kill(name, stage.random.choice((signal.SIGKILL, signal.SIGTERM)))
    stage.mesh.restart(name)


async def kill_two(stage: Stage) -> None:
    names = free(stage)[:2]
    for name in names:
        stage.mesh.kill(name)
    for name in names:
        stage.mesh.restart(name)


async def kill_repeatedly(stage: Stage) -> None:
    for _ in range(4):
        stage.mesh.kill("worker-0")
        stage.mesh.restart("worker-0")
        await asyncio.sleep(1)


async def freeze_two(stage: Stage) -> None:
    processes = [stage.mesh.processes[name] for name in free(stage)[:2]]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(FROZEN_S)
    for process in processes:
        process.send_signal(signal.SIGCONT)


async def kill_and_freeze(stage: Stage) -> None:
    await asyncio.gather(kill(stage), freeze_nats(stage))


async def freeze_nats(stage: Stage) -> None:
    stage.nats.signal(signal.SIGSTOP)
    await asyncio.sleep(FROZEN_S)
    stage.nats.signal(signal.SIGCONT)


async def restart_nats(stage: Stage) -> None:
    await asyncio.to_thread(stage.nats.restart)


async def lose_store(stage: Stage) -> None:
    await asyncio.to_thread(stage.nats.kill)
    store = stage.nats.store / "js" / "jetstream"
    await asyncio.to_thread(shutil.rmtree, store)
    await asyncio.to_thread(stage.nats.start)


async def lose_store_and_kill(stage: Stage) -> None:
    name = free(stage)[0]
    stage.mesh.kill(name)
    await lose_store(stage)
    stage.mesh.restart(name)


async def skew_clock(stage: Stage) -> None:
    """Start a process anew with its clock an hour wrong, and later again with the right one."""
    assert stage.clock is not None
    name = free(stage)[0]
    stage.mesh.kill(name)
    role, env = stage.mesh.commands[name]
    ahead = stage.random.choice((-HOUR_S, HOUR_S))
    every = {**stage.mesh.settings(role, name), **env}
    log = stage.mesh.folder / f"{name}.log"
    stage.mesh.processes[name] = skewed.start(role, every, stage.clock, ahead, log)
    await asyncio.sleep(10)
    stage.mesh.kill(name, signal.SIGTERM)
    stage.mesh.restart(name)


async def fill_disk(stage: Stage) -> None:
    """Fill the disk of NATS, make room again, and restart NATS, as its runbook says."""
    filler = stage.nats.store / "js" / "filler"
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    await asyncio.sleep(FROZEN_S)
    filler.unlink()
    await restart_nats(stage)


ROUNDS: dict[str, Round] = {
    "kill one": kill,
    "kill two at once": kill_two,
    "kill one worker four times": kill_repeatedly,
    "freeze two at once": freeze_two,
    "freeze NATS, kill one": kill_and_freeze,
    "restart NATS": restart_nats,
    "lose the store": lose_store,
    "lose the store, kill one": lose_store_and_kill,
    "a clock an hour wrong": skew_clock,
    "fill the disk of NATS": fill_disk,
}


async def succeeds(*command: str) -> bool:
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)
    return done.returncode == 0


@asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[Stage]:
    store = folder / "nats"
    (store / "js").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(store / "js")]
    disk = await succeeds(*mount)
    nats = NatsServer(store)
    nats.start()
    mesh = Mesh(nats.url, folder, {"KVMESH_MOCK_SPEEDUP": "4"})
    for kind in ("KV", "ROUTE", "SEQ", "SCALING", "MODELS"):  # so that they fit on the small disk
        mesh.env[f"KVMESH_STREAMS_{kind}_BYTES"] = str(8 << 20)
    mesh.env["KVMESH_FRONTEND_STORED_ANSWERS_BYTES"] = str(8 << 20)
    mesh.env["KVMESH_FRONTEND_RESPONSES_BYTES"] = str(8 << 20)
    try:
        for name in ROLES:
            port = {"KVMESH_FRONTEND_PORT": "0"} if name == "frontend-1" else {}
            mesh.start(name.partition("-")[0], name, **port)
        mesh.start("frontend", "frontend-0")
        await mesh.ready()
        clock = skewed.clock_library(folder)
        yield Stage(nats, mesh, folder, clock, random.Random(SEED), disk)
    finally:
        mesh.stop()
        nats.stop()
        if disk:
            await succeeds("umount", str(store / "js"))


async def attack(stage: Stage, row: Row, fault: Round) -> None:
    """Run one round under traffic, and wait until clients are served as before."""
    prompts = distinct_prompts(2)
    async with Traffic(stage.mesh.url, prompts, tokens=40, answers=stage.answers) as traffic:
        await traffic.wait_for_outputs()
        await fault(stage)
        await traffic.wait_for_outputs()
    await stage.mesh.ready()
    row.tries += 1
    row.requests += traffic.completed + len(traffic.failed)
    for failure in traffic.failed:
        wrong = failure.startswith("AssertionError") and "ended after" not in failure
        (row.wrong if wrong else row.failed).append(failure)
    row.pause_s = max(row.pause_s, traffic.longest_pause)


def table(rows: dict[str, Row]) -> str:
    head = f"{'fault':28}  tries  requests  failed  wrong  longest pause"
    lines = [
        f"{name:28} {row.tries:6} {row.requests:9} {len(row.failed):7} {len(row.wrong):6}"
        f" {row.pause_s:12.1f} s"
        for name, row in rows.items()
    ]
    return "\n".join([head, *lines])


async def test_rounds_of_faults(tmp_path: Path) -> None:
    rows: dict[str, Row] = {}
    async with staged(tmp_path) as stage:
        print(f"\n{MINUTES:g} minutes, seed {SEED}")
        ends = time.monotonic() + 60 * MINUTES
        for name, fault in itertools.cycle(ROUNDS.items()):
            if time.monotonic() > ends:
                break
            if (fault is fill_disk and not stage.disk) or (
                fault is skew_clock and stage.clock is None
            ):
                continue
            await attack(stage, rows.setdefault(name, Row()), fault)
        print(table(rows))
        failures = [text for row in rows.values() for text in (*row.failed, *row.wrong)]
        assert failures == []
        assert max(row.pause_s for row in rows.values()) < PAUSE_S
