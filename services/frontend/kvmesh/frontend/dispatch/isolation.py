"""Suspects are tried one at a time, so that a second death tells which of them it was."""

import asyncio
from collections.abc import Callable

from kvmesh.frontend.dispatch.suspects import Suspects
from kvmesh.frontend.dispatch.token_stream import TokenStream

WAIT_S = 2.0  # who comes after many others is tried beside them instead of waiting longer
TRIAL_S = 10.0
LOOK_S = 0.02
CALM_S = 1.5
MOST_CALM_S = 6.0


class Isolation:
    """Lets the next suspect go to an engine when the last one has got its first token there.

    Workers that somebody kills one after the other would each look like the victim of what is
    tried on them: after `lost_at()`, when the last one went, nothing is for CALM_S seconds.
    """

    def __init__(self, suspects: Suspects, lost_at: Callable[[], float]) -> None:
        self._suspects = suspects
        self._lost_at = lost_at
        self._turn = asyncio.Lock()
        self._trial: asyncio.Task[None] | None = None
        self._tried: TokenStream | None = None

    async def enter(self, sequence: TokenStream) -> None:
        """Wait for one's turn, unless it takes too long."""
        if self._tried is sequence:
            return
        await self._calm()
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            return
        self._tried = sequence
        self._trial = asyncio.create_task(self._try(sequence), name="trial")

    async def _calm(self) -> None:
        now = asyncio.get_running_loop().time
        ends = now() + MOST_CALM_S
        while (left := min(self._lost_at() + CALM_S, ends) - now()) > 0:
            await asyncio.sleep(left)

    async def _try(self, sequence: TokenStream) -> None:
        try:
            async with asyncio.timeout(TRIAL_S):
                while sequence.id in self._suspects and not sequence.fresh:
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            return
        finally:
            self._tried = None
            self._turn.release()
