"""A frontend that records the pauses of its event loop in the file that `TICKS` names.

`Ticks` reads the file from another process. CPU time of the whole process separates a stall of its
own from a busy machine: a loop that waits for the interpreter lock waits for a computing thread.
"""

import asyncio
import gc
import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

from kvmesh.frontend.service import main
from kvmesh.runtime.service import Service, run_service
from kvmesh.settings import load

TICKS = "TICKS"
EVERY_S = 0.001
_FORM = struct.Struct("4d")


class Stalls(NamedTuple):
    """Seconds of a process's stalls.

    The longest pause of its loop by the clock and in CPU time, its longest garbage collection, and
    all collections together.
    """

    wall: float = 0.0
    cpu: float = 0.0
    longest_gc: float = 0.0
    gc: float = 0.0


class Ticks:
    """Stalls since the last `reset`."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(bytes(_FORM.size))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _FORM.size)

    def read(self) -> Stalls:
        return Stalls(*_FORM.unpack(self._map[: _FORM.size]))

    def write(self, stalls: Stalls) -> None:
        self._map[: _FORM.size] = _FORM.pack(*stalls)

    def reset(self) -> None:
        self.write(Stalls())


class Ticker:
    """Records the stalls of its process."""

    def __init__(self, ticks: Ticks) -> None:
        self._ticks = ticks
        self._began = 0.0
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began = time.perf_counter()
            return
        took, told = time.perf_counter() - self._began, self._ticks.read()
        self._ticks.write(told._replace(longest_gc=max(told.longest_gc, took), gc=told.gc + took))

    async def run(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(EVERY_S)
            now, spent = time.perf_counter(), time.process_time()
            told = self._ticks.read()
            if now - wall > told.wall or spent - cpu > told.cpu:
                longest = told._replace(
                    wall=max(told.wall, now - wall), cpu=max(told.cpu, spent - cpu)
                )
                self._ticks.write(longest)
            wall, cpu = now, spent


async def ticking(service: Service) -> None:
    service.spawn(Ticker(Ticks(Path(os.environ[TICKS]))).run(), "ticker")
    await main(service)


if __name__ == "__main__":
    settings = load(None, os.environ, {})
    sys.exit(run_service("frontend", settings.frontend.name, settings, ticking))
