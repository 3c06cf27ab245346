"""Orders on the bus to replace processes of `kvmesh up`, as `kvmesh fleet roll` writes them."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from kvmesh.bus.errors import BusError, NotFound, cause
from kvmesh.bus.messages import MessageDecoder, Replacement, ReplacementReport, encode
from kvmesh.bus.storage.buckets import keys_reader
from kvmesh.bus.streams.reader import StreamMessage, StreamReader
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.mesh import SupervisedMesh
from kvmesh.cli.supervisor.mesh_view import MeshView
from kvmesh.settings import Settings

log = logging.getLogger(__name__)
MOST_WAITING = 64
POLL_S = 0.05
PROGRAM_S = 60.0
CLOSE_S = 2.0
STALE_S = 600.0
_orders = MessageDecoder(Replacement)


class Replacements:
    """Follows the orders from `open` on, and obeys those for processes of `mesh`, one at a time.

    Orders from before are those of an earlier mesh. Each gets a report when it begins and one when
    it ends. `note` gets both, for the log.
    """

    def __init__(
        self,
        view: MeshView,
        settings: Settings,
        mesh: SupervisedMesh,
        note: Callable[[str], None],
    ) -> None:
        self._view = view
        self._bus = view.bus
        self._mesh = mesh
        self._note = note
        self._drain_s = {
            "worker": settings.worker.drain_timeout_s,
            # its running requests are hurried after half of the time
            "frontend": 2 * (settings.frontend.drain_timeout_s + settings.frontend.linger_s),
        }
        self._stop_s = settings.up.stop_timeout_s
        self._waiting: asyncio.Queue[Replacement] = asyncio.Queue(MOST_WAITING)
        self._before = ""
        self._reader: StreamReader | None = None
        self._working: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Follow the orders; raises BusError."""
        subjects = self._bus.subjects
        bucket = self._bus.bucket(subjects.plan_bucket)
        with suppress(NotFound, msgspec.MsgspecError):
            self._before = _orders.decode(
                (await bucket.get(subjects.replacement_key)).value or b""
            ).order
        self._reader = keys_reader(
            self._bus, subjects.plan_bucket, subjects.replacement_key, self._receive
        )
        await self._reader.open()
        self._working = asyncio.create_task(self._work(), name="replacements")

    async def close(self) -> None:
        """Obey no more orders; a replacement that goes on is left as it is."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._reader is not None:
                    await self._reader.close()
        except (TimeoutError, BusError) as error:
            log.debug("the reader of replacements stays: %s", cause(error))

    def _receive(self, message: StreamMessage) -> None:
        try:
            order = _orders.decode(message.data)
        except msgspec.MsgspecError as error:
            if message.data:
                log.warning("ignored a malformed order to replace a process: %s", error)
            return
        if order.order == self._before or not self._mesh.runs(order.name):
            return  # of another operator
        self._before = order.order
        try:
            self._waiting.put_nowait(order)
        except asyncio.QueueFull:
            log.warning("ignored an order to replace %s: too many wait", order.name)

    async def _work(self) -> None:
        while True:
            order = await self._waiting.get()
            if time.time() - order.time > STALE_S:
                continue  # nobody waits for it any more
            await self._report(order, False, "")
            error = ""
            try:
                await self._obey(order)
            except UpError as failure:
                error = str(failure)
            self._note(f"{order.name} is replaced" if not error else f"not replaced: {error}")
            await self._report(order, True, error)

    async def _obey(self, order: Replacement) -> None:
        """Replace the process of an order; raises UpError."""
        by = f" by {order.program}" if order.program else ""
        self._note(f"replacing {order.name}{by} as {order.by or 'somebody'} wants")
        program = _interpreter(order.program)
        if program:
            await _check_program(program)
        if not self._mesh.runs(order.name):
            raise UpError(f"{order.name} has ended")
        role = self._mesh.role_of(order.name)
        timeout_s = self._drain_s.get(role, 0.0) + self._stop_s
        present = self._view.joined.get(order.name, set())
        await self._mesh.replace(
            order.name, program, timeout_s, self._joined(order.name, frozenset(present))
        )

    async def _joined(self, name: str, before: frozenset[str]) -> None:
        while not self._view.joined.get(name, set()) - before:
            await asyncio.sleep(POLL_S)

    async def _report(self, order: Replacement, ended: bool, error: str) -> None:
        subjects = self._bus.subjects
        report = ReplacementReport(name=order.name, order=order.order, ended=ended, error=error)
        try:
            await self._bus.bucket(subjects.plan_bucket).put(subjects.replaced_key, encode(report))
        except BusError as failure:
            log.warning("cannot report that %s is replaced: %s", order.name, cause(failure))


def _interpreter(program: str) -> str:
    path = Path(program)
    return str(path / "bin" / "python") if program and path.is_dir() else program


async def _check_program(program: str) -> None:
    """Raise UpError unless an interpreter has kvmesh."""
    command = (program, "-m", "kvmesh.cli.main", "--version")
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise UpError(f"cannot run {program}: {error.strerror}") from error
    try:
        async with asyncio.timeout(PROGRAM_S):
            _, output = await process.communicate()
    except TimeoutError:
        raise UpError(f"{program} did not print its version in {PROGRAM_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = output.decode(errors="replace").strip().rpartition("\n")[2]
        raise UpError(f"{program} has no kvmesh that runs: {last}")
