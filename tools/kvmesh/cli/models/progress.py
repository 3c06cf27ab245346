"""Lines that tell of long steps: on a terminal one that changes, else one every ten seconds."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvmesh.runtime.quantities import duration, size

TELL_S = 10.0
SHOW_S = 0.5  # on a terminal


@asynccontextmanager
async def told(text: str) -> AsyncIterator[None]:
    """Within the block, tell every TELL_S seconds that this is done, and for how long."""
    began = time.monotonic()

    async def tell() -> None:
        while True:
            await asyncio.sleep(TELL_S)
            print(f"{text}: {duration(time.monotonic() - began)} so far", file=sys.stderr)

    telling = asyncio.create_task(tell(), name="progress of a step")
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.wait({telling})


class BytesProgress:
    """Tells of bytes done, on standard error."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._began = self._shown_at = time.monotonic()

    def show(self, done: int, total: int) -> None:
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now - self._shown_at < (SHOW_S if terminal else TELL_S):
            return
        self._shown_at = now
        text = f"{self._verb} {size(done)} of {size(total)}, {duration(now - self._began)} so far"
        if terminal:
            print(f"\r{text:<60}", end="\r", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
