"""The gate at which vLLM's ranks wait, in the process of the worker that starts them."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

SOCKET_VARIABLE = "KVMESH_PARKING_SOCKET"  # inherited by vLLM's processes
CLASS_VARIABLE = "KVMESH_PARKED_CLASS"  # of vLLM's worker, which the parked one extends
WORKER_CLASS = "kvmesh.worker.engines.vllm.parking.rank.ParkedRank"
GO = b"go"


class ParkingGate:
    """Each rank connects to a socket in the private `folder`, and waits there for GO.

    A connection that ends without it tells the rank that this process is gone, or does not want it
    any more; so no rank outlives it. `expect` may be called by any thread, the rest by that of the
    loop.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "parking"
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._waiting: set[asyncio.StreamWriter] = set()
        self._expected = 0
        self._parked = asyncio.Event()

    async def open(self) -> None:
        """Listen; raises OSError."""
        self._server = await asyncio.start_unix_server(self._admit, self._path)

    def expect(self, ranks: int, worker_class: str) -> None:
        """Have the processes that start from now on park; `ranks` of them run `worker_class`."""
        os.environ[SOCKET_VARIABLE], os.environ[CLASS_VARIABLE] = str(self._path), worker_class
        self._loop.call_soon_threadsafe(self._expect, ranks)

    @property
    def waiting(self) -> int:
        """The number of ranks that wait."""
        return len(self._waiting)

    async def parked(self) -> None:
        """Return once all ranks wait."""
        await self._parked.wait()

    async def release(self) -> None:
        """Let all ranks go on."""
        for writer in self._waiting:
            writer.write(GO)
        await self.close()

    async def close(self) -> None:
        """Turn away all ranks that wait without leave to go on."""
        os.environ.pop(SOCKET_VARIABLE, None)
        os.environ.pop(CLASS_VARIABLE, None)
        if self._server is not None:
            self._server.close()
            self._server = None
        while self._waiting:
            writer = self._waiting.pop()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        self._path.unlink(missing_ok=True)

    def _expect(self, ranks: int) -> None:
        self._expected = ranks
        self._check()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            writer.close()
            return
        self._waiting.add(writer)
        self._check()
        with suppress(OSError):
            await reader.read(1)  # until the rank ends: it sends nothing
        self._waiting.discard(writer)
        writer.close()

    def _check(self) -> None:
        if self._expected and self.waiting >= self._expected:
            self._parked.set()
