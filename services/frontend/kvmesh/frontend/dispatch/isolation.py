"""Isolation of suspects: one trial at a time, so that a second crash identifies its cause."""

import asyncio
from collections.abc import Callable

from kvmesh.frontend.dispatch.suspects import Suspects
from kvmesh.frontend.dispatch.token_stream import TokenStream

WAIT_S = 2.0  # for the trials of other suspects; after that a suspect runs beside them
TRIAL_S = 10.0
POLL_S = 0.02
CALM_S = 1.5
MAX_CALM_S = 6.0


class Isolation:
    """Admits the next suspect once the previous one has its first token.

    No trial starts within CALM_S seconds of `lost_at()`, the last loss of a worker: while workers
    are killed in turn, every suspect would look like the cause.
    """

    def __init__(self, suspects: Suspects, lost_at: Callable[[], float]) -> None:
        self._suspects = suspects
        self._lost_at = lost_at
        self._trial_lock = asyncio.Lock()
        self._trial: asyncio.Task[None] | None = None
        self._on_trial: TokenStream | None = None

    async def enter(self, stream: TokenStream) -> None:
        """Return when the suspect may be dispatched: in its trial, or WAIT_S after the calm."""
        if self._on_trial is stream:
            return
        await self._wait_for_calm()
        try:
            async with asyncio.timeout(WAIT_S):
                await self._trial_lock.acquire()
        except TimeoutError:
            return
        self._on_trial = stream
        self._trial = asyncio.create_task(self._run_trial(stream), name="trial")

    async def _wait_for_calm(self) -> None:
        now = asyncio.get_running_loop().time
        ends = now() + MAX_CALM_S
        while (left := min(self._lost_at() + CALM_S, ends) - now()) > 0:
            await asyncio.sleep(left)

    async def _run_trial(self, stream: TokenStream) -> None:
        try:
            async with asyncio.timeout(TRIAL_S):
                while stream.id in self._suspects and not stream.fresh:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return
        finally:
            self._on_trial = None
            self._trial_lock.release()
