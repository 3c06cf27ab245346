"""Subjects that NATS refuses to the connections in vLLM's processes, told to their worker.

Only the worker has a card. Each bridge tells its present refusals at every change, on a socket that
it keeps open: a bridge that ends has none.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import cause
from kvmesh.bus.faults import REFUSED
from kvmesh.bus.permissions import User

log = logging.getLogger(__name__)
SOCKET_VARIABLE = "KVMESH_REFUSED_SOCKET"  # inherited by vLLM's processes
RETRY_S = 1.0
LINE_BYTES = 1 << 20
_texts = msgspec.json.Decoder(dict[str, str])
OnRefused = Callable[[str, Mapping[str, str]], None]


@asynccontextmanager
async def refusals_heard(folder: Path, on_refused: OnRefused) -> AsyncIterator[None]:
    """Within the block, call `on_refused` with a bridge and its present refusals at each change.

    Processes that start here find the socket, which is in the private `folder`, by a variable of
    the environment.
    """
    path = folder / "refused"
    handling: set[asyncio.Task[None]] = set()
    numbers = itertools.count(1)

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = f"vllm bridge {next(numbers)}"
        try:
            while line := await reader.readline():
                on_refused(source, _texts.decode(line))
        except (OSError, ValueError) as error:
            log.warning("a process of vLLM does not tell what NATS refuses to it: %s", cause(error))
        finally:
            on_refused(source, {})
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(receive(reader, writer), name="refusals of vllm")
        handling.add(task)
        task.add_done_callback(handling.discard)

    try:
        server = await asyncio.start_unix_server(accept, path, limit=LINE_BYTES)
    except OSError as error:
        log.warning("vLLM's processes cannot tell what NATS refuses to them: %s", error)
        yield
        return
    os.environ[SOCKET_VARIABLE] = str(path)
    try:
        yield
    finally:
        os.environ.pop(SOCKET_VARIABLE, None)
        server.close()
        for task in handling:
            task.cancel()
        if handling:
            await asyncio.wait(handling)


class RefusalTeller:
    """Tells the worker that started this process what NATS refuses to a connection."""

    def __init__(self, bus: Bus) -> None:
        self._changed = asyncio.Event()
        self._present: dict[str, str] = {}
        self._telling: asyncio.Task[None] | None = None
        path = os.environ.get(SOCKET_VARIABLE)
        if path is None:
            return  # no worker has started vLLM: the connection logs its faults
        bus.refusals.need(bus.needs(User.WORKER).publish)
        self._telling = asyncio.create_task(self._tell(path), name="refusals")
        bus.faults.observe(self._on_faults)

    async def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})

    def _on_faults(self, kind: str, found: Mapping[str, str]) -> None:
        if kind == REFUSED:
            self._present = dict(found)
            self._changed.set()

    async def _tell(self, path: str) -> None:
        await self._changed.wait()  # most connections have nothing to tell
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(path)
            except OSError as error:
                log.debug("the worker does not listen: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._write(writer)
            except OSError as error:
                log.debug("the worker listens no more: %s", error)
            finally:
                writer.close()

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        while True:
            self._changed.clear()
            writer.write(msgspec.json.encode(self._present) + b"\n")
            await writer.drain()
            await self._changed.wait()
