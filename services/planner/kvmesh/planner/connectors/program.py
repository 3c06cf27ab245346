"""Runs a program of the operator's choice with a deadline and bounded output."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from subprocess import DEVNULL, PIPE

from kvmesh.planner.connectors.interface import ConnectorError

OUTPUT_BYTES = 4 << 20
REST_S = 1.0  # wait for output after the exit: a background process may hold the pipes open
ERROR_BYTES = 4096
REASON_CHARACTERS = 500


async def run_program(argv: Sequence[str], timeout_s: float) -> bytes:
    """Run `argv` without a shell; returns its output.

    Raises ConnectorError with the exit status and the end of stderr. A program that runs longer
    than `timeout_s` seconds, or whose caller is cancelled, is killed with its process group.
    """
    try:
        transport, program = await _started(argv)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConnectorError(f"cannot run {argv[0]}: {reason}", permanent=True) from error
    try:
        async with asyncio.timeout(timeout_s):
            await program.exited.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                await program.closed.wait()
    except TimeoutError:
        late = f"{_shown(argv)} did not end within {timeout_s:g} s"
        raise ConnectorError(late + _reason(program.errors)) from None
    finally:
        await _end(transport, program)
    status = transport.get_returncode() or 0
    if status:
        end = f"exited with status {status}"
        if status < 0:
            end = f"was killed by {signal.Signals(-status).name}"
        raise ConnectorError(f"{_shown(argv)} {end}{_reason(program.errors)}")
    if len(program.output) > OUTPUT_BYTES:
        raise ConnectorError(f"{_shown(argv)} printed more than {OUTPUT_BYTES} bytes")
    return bytes(program.output)


class _Program(asyncio.SubprocessProtocol):
    """Collects output, and signals exit and end of output separately.

    `asyncio.subprocess` signals the exit only once the output has ended.
    """

    def __init__(self) -> None:
        self.output, self.errors = bytearray(), bytearray()
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        self._open = 2

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Keep the beginning of the output, enough to notice too much, and the end of stderr."""
        if fd == 1:
            self.output += data[: OUTPUT_BYTES + 1 - len(self.output)]
        else:
            self.errors = (self.errors + data)[-ERROR_BYTES:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open -= 1
        if not self._open:
            self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()


async def _started(argv: Sequence[str]) -> tuple[asyncio.SubprocessTransport, _Program]:
    """The running program; raises OSError or ValueError.

    A cancelled caller waits for the start and ends the program: asyncio would wait forever for
    the pipes of a start that it cancels.
    """
    starting = asyncio.create_task(
        asyncio.get_running_loop().subprocess_exec(
            _Program, *argv, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
    )
    try:
        await asyncio.wait({starting})
    except asyncio.CancelledError:
        await asyncio.wait({starting})
        if starting.exception() is None:
            await _end(*starting.result())
        raise
    return starting.result()


async def _end(transport: asyncio.SubprocessTransport, program: _Program) -> None:
    """Kill the program with its process group if it runs, and close its pipes."""
    if not program.exited.is_set():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(transport.get_pid(), signal.SIGKILL)
        await program.exited.wait()
    transport.close()


def _shown(argv: Sequence[str]) -> str:
    return " ".join(argv[:3]) + (" …" if len(argv) > 3 else "")


def _reason(errors: bytearray) -> str:
    text = errors.decode(errors="replace").strip()
    return f": {text[-REASON_CHARACTERS:]}" if text else ""
