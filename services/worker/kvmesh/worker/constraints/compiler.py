"""Constraints that take an engine long to understand: off the loop, a bounded while, before it."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kvmesh.bus.messages import Guided, Work, owner
from kvmesh.runtime.fair_slots import FairSlots
from kvmesh.worker.engine import EngineError, OutputDelta, Rejected

log = logging.getLogger(__name__)
MOST = 128
MOST_OF_ONE = 32  # owner
AT_ONCE = 2


@runtime_checkable
class Compiling(Protocol):
    """The methods beyond `Engine` of an engine that compiles constraints before it takes work."""

    def compiled(self, guided: Guided) -> bool:
        """Whether `submit` of work with this constraint takes no time."""
        ...

    async def compile(self, guided: Guided) -> None:
        """Make that so, off the loop, in a bounded time; raises Rejected if the constraint takes
        more, and EngineError if it is not at fault. May be cancelled."""
        ...


class ConstraintCompiler:
    """Work that is accepted before its constraint is compiled.

    Owners have turns: who sends slow ones delays each other owner by one of them. `begin` hands
    work to the engine, or says why not. Its frontend is told of either.
    """

    def __init__(
        self,
        engine: object,
        begin: Callable[[Work], str],
        tell: Callable[[list[OutputDelta]], None],
    ) -> None:
        self._engine = engine if isinstance(engine, Compiling) else None
        self._submit = begin
        self._emit = tell
        self._slots = FairSlots(AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._owners: Counter[str] = Counter()

    def has_capacity(self, work: Work) -> bool:
        """Whether this work may wait for its constraint."""
        return len(self._tasks) < MOST and self._owners[owner(work.tenant)] < MOST_OF_ONE

    def must_compile(self, work: Work) -> bool:
        """Whether the constraint of this work has to be compiled."""
        guided = work.sampling.guided
        return self._engine is not None and guided is not None and not self._engine.compiled(guided)

    def start(self, work: Work) -> None:
        """Compile, then begin."""
        whose = owner(work.tenant)
        task = asyncio.create_task(self._run(work, whose), name="compile")
        self._tasks[work.request] = task
        self._owners[whose] += 1
        task.add_done_callback(lambda _: self._release_owner(whose))

    def _release_owner(self, whose: str) -> None:
        self._owners[whose] -= 1
        if not self._owners[whose]:
            del self._owners[whose]

    def abort(self, request: str) -> bool:
        """Begin it no more; False if it is not here."""
        task = self._tasks.pop(request, None)
        if task is None:
            return False
        task.cancel()
        self._emit([OutputDelta(request, [], finish="abort")])
        return True

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def drain(self) -> None:
        """Return once all that is being compiled has begun or been refused."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def _run(self, work: Work, whose: str) -> None:
        async with self._slots.held(whose):
            last = await self._compile(work) if self.must_compile(work) else None
        self._tasks.pop(work.request, None)
        if last is None and (reason := self._submit(work)):
            last = _refusal(work, reason)
        self._emit([last or OutputDelta(work.request, [])])

    async def _compile(self, work: Work) -> OutputDelta | None:
        """The end of work whose constraint cannot be followed, or not here; else None."""
        guided = work.sampling.guided
        assert self._engine is not None
        assert guided is not None
        try:
            await self._engine.compile(guided)
        except Rejected as rejected:
            return _refusal(work, rejected.reason)
        except EngineError as error:
            log.error("a request is given back, its %s was not compiled: %s", guided.kind, error)
            return OutputDelta(work.request, [], finish="abort", error=str(error))
        except Exception:
            log.exception("the engine failed to compile a %s", guided.kind)
            return _refusal(work, "the engine failed on it; its worker has logged why")
        return None


def _refusal(work: Work, reason: str) -> OutputDelta:
    return OutputDelta(work.request, [], finish="error", error=reason, invalid=True)
