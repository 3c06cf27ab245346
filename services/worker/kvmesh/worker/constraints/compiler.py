"""Compiles constraints before the engine gets the work: off the event loop and in bounded time."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kvmesh.bus.messages import Guided, Work, owner
from kvmesh.runtime.fair_slots import FairSlots
from kvmesh.worker.engine import EngineError, OutputDelta, Rejected

log = logging.getLogger(__name__)
MAX_WAITING = 128
MAX_PER_OWNER = 32
CONCURRENCY = 2


@runtime_checkable
class Compiling(Protocol):
    """Engine that compiles constraints before `submit`."""

    def compiled(self, guided: Guided) -> bool:
        """True if `submit` of work with this constraint takes no time."""
        ...

    async def compile(self, guided: Guided) -> None:
        """Compile a constraint off the event loop, in bounded time; may be cancelled.

        Raises Rejected if the constraint takes longer, and EngineError if it is not at fault.
        """
        ...


class ConstraintCompiler:
    """Compiles the constraints of accepted work, then submits it by `submit`.

    Owners are served round-robin: slow constraints of one delay each other by one of them. `submit`
    returns the reason if the engine refuses the work. `emit` receives the outcome for the frontend.
    """

    def __init__(
        self,
        engine: object,
        submit: Callable[[Work], str],
        emit: Callable[[list[OutputDelta]], None],
    ) -> None:
        self._engine = engine if isinstance(engine, Compiling) else None
        self._submit = submit
        self._emit = emit
        self._slots = FairSlots(CONCURRENCY)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._owners: Counter[str] = Counter()

    def has_capacity(self, work: Work) -> bool:
        """True if one more request of this owner may wait for its constraint."""
        return len(self._tasks) < MAX_WAITING and self._owners[owner(work.tenant)] < MAX_PER_OWNER

    def must_compile(self, work: Work) -> bool:
        """True if the work has a constraint that is not compiled."""
        guided = work.sampling.guided
        return self._engine is not None and guided is not None and not self._engine.compiled(guided)

    def start(self, work: Work) -> None:
        """Compile the constraint of work, then submit it."""
        owner_name = owner(work.tenant)
        task = asyncio.create_task(self._run(work, owner_name), name="compile")
        self._tasks[work.request] = task
        self._owners[owner_name] += 1
        task.add_done_callback(lambda _: self._release_owner(owner_name))

    def _release_owner(self, owner_name: str) -> None:
        self._owners[owner_name] -= 1
        if not self._owners[owner_name]:
            del self._owners[owner_name]

    def abort(self, request: str) -> bool:
        """Abort work before its submission; False if it is unknown."""
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
        """Return once all waiting work is submitted or refused."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def _run(self, work: Work, owner_name: str) -> None:
        async with self._slots.held(owner_name):
            last = await self._compile(work) if self.must_compile(work) else None
        self._tasks.pop(work.request, None)
        if last is None and (reason := self._submit(work)):
            last = _refusal(work, reason)
        self._emit([last or OutputDelta(work.request, [])])

    async def _compile(self, work: Work) -> OutputDelta | None:
        """Compile a constraint; return the last delta of the work if that fails, else None."""
        guided = work.sampling.guided
        assert self._engine is not None
        assert guided is not None
        try:
            await self._engine.compile(guided)
        except Rejected as rejected:
            return _refusal(work, rejected.reason)
        except EngineError as error:
            log.error("request handed back, its %s was not compiled: %s", guided.kind, error)
            return OutputDelta(work.request, [], finish="abort", error=str(error))
        except Exception:
            log.exception("the engine failed to compile a %s", guided.kind)
            return _refusal(work, "the engine failed on this request; see the worker's log")
        return None


def _refusal(work: Work, reason: str) -> OutputDelta:
    return OutputDelta(work.request, [], finish="error", error=reason, invalid=True)
