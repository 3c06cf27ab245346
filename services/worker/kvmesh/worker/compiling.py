"""Constraints that take an engine long to understand: off the loop, a bounded while, before it."""

import asyncio
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kvmesh.bus.messages import Guided, Work
from kvmesh.worker.engine import Delta, Rejected

MOST = 64


@runtime_checkable
class Compiling(Protocol):
    """What an engine has besides `Engine` if constraints are compiled before it takes work."""

    def compiled(self, guided: Guided) -> bool:
        """Whether `submit` of work with this constraint takes no time."""
        ...

    async def compile(self, guided: Guided) -> None:
        """Make that so, in a thread; raises Rejected."""
        ...


class Compiler:
    """Work that is accepted while its constraint is compiled, for `most_s` seconds at most.

    `begin` hands it to the engine and says why not if so. Its frontend is told of either.
    """

    def __init__(
        self,
        engine: object,
        most_s: float,
        begin: Callable[[Work], str],
        tell: Callable[[list[Delta]], None],
    ) -> None:
        self._engine = engine if isinstance(engine, Compiling) else None
        self._most_s = most_s
        self._begin = begin
        self._tell = tell
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def full(self) -> bool:
        return len(self._tasks) >= MOST

    def needs(self, work: Work) -> bool:
        """Whether the constraint of this work has to be compiled."""
        guided = work.sampling.guided
        return self._engine is not None and guided is not None and not self._engine.compiled(guided)

    def start(self, work: Work) -> None:
        """Compile, then begin."""
        self._tasks[work.request] = asyncio.create_task(self._run(work), name="compile")

    def abort(self, request: str) -> bool:
        """Begin it no more; False if it is not here."""
        task = self._tasks.pop(request, None)
        if task is None:
            return False
        task.cancel()
        self._tell([Delta(request, [], finish="abort")])
        return True

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def drain(self) -> None:
        """Return once all that is being compiled has begun or been refused."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def _run(self, work: Work) -> None:
        reason = await self._compile(work.sampling.guided)
        self._tasks.pop(work.request, None)
        reason = reason or self._begin(work)
        if reason:
            refusal = Delta(work.request, [], finish="error", error=reason, invalid=True)
            self._tell([refusal])
        else:
            self._tell([Delta(work.request, [])])

    async def _compile(self, guided: Guided | None) -> str:
        """Why the constraint cannot be followed; empty if it can."""
        if self._engine is None or guided is None:
            return ""
        try:
            async with asyncio.timeout(self._most_s):
                await self._engine.compile(guided)
        except Rejected as rejected:
            return rejected.reason
        except TimeoutError:
            return f"the {guided.kind} takes more than {self._most_s:g} s to compile"
        return ""
