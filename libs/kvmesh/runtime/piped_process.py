"""A process that computes beside its parent: frames of bytes on its pipes, one task at a time."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import BinaryIO

STOP_S = 1.0
NICE = 10  # the mesh comes first
HEADER_BYTES = 8
Send = Callable[[bytes], None]


class PipedProcess:
    """Runs a module whose main program is `serve_frames`.

    It starts with the first frame, and again with the next one after it was killed or has died.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process unless it runs; raises OSError."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for the parent, which ends it
            )

    async def send(self, data: bytes) -> None:
        """Send a frame; raises OSError."""
        await self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(HEADER_BYTES))
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def receive(self) -> bytes:
        """The next frame; raises EOFError if the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        size = int.from_bytes(await self._process.stdout.readexactly(HEADER_BYTES))
        return await self._process.stdout.readexactly(size)

    async def close(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()


def serve_frames(handle: Callable[[bytes, Send], None]) -> None:
    """Pass each frame of standard input to `handle`, which sends frames to standard output."""
    os.nice(NICE)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not end up among the frames
    with contextlib.suppress(BrokenPipeError):
        _serve(sys.stdin.buffer, sink, handle)


def _serve(source: BinaryIO, sink: BinaryIO, handle: Callable[[bytes, Send], None]) -> None:
    def send(data: bytes) -> None:
        sink.write(len(data).to_bytes(HEADER_BYTES) + data)
        sink.flush()

    while header := source.read(HEADER_BYTES):
        handle(source.read(int.from_bytes(header)), send)
