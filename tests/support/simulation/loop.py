"""An asyncio event loop with virtual time and an order of callbacks that a seed determines.

Every process of a simulated mesh is a *node*: a name in the context of its callbacks and tasks.
Within a node callbacks run in asyncio's order; the seed chooses the node that runs next, as an
operating system schedules processes. A frozen node runs nothing while time passes; a dead one
never runs again. Time passes only while no node has anything to run.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from hashlib import blake2b
from random import Random
from typing import Any, TypeVar

NODE: ContextVar[str] = ContextVar("node", default="world")
STEP_S = 20e-6  # duration of a callback
TURNS = 256
T = TypeVar("T")


class SimLoop(asyncio.BaseEventLoop):
    """Runs everything in one thread; the same seed gives the same run to the last callback."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = Random(seed)
        self.now = 0.0
        self.steps = 0
        self.frozen: set[str] = set()
        self.dead: set[str] = set()
        self.tasks: list[asyncio.Task[Any]] = []
        self.failures: list[str] = []
        self._digest = blake2b(digest_size=16)
        self._queues: dict[str, deque[asyncio.Handle]] = {}
        self._timers: list[tuple[float, int, str, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._on_exception)

    # --- nodes

    def spawn(self, node: str, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as, or within, a node."""
        context = copy_context()
        context.run(NODE.set, node)
        return self.create_task(coroutine, context=context)

    def kill(self, node: str) -> None:
        """End a node as SIGKILL does: its pending callbacks never run."""
        self.dead.add(node)
        self._queues.pop(node, None)

    def add_to_digest(self, *facts: object) -> None:
        """Add values to the digest of this run."""
        self._digest.update(repr(facts).encode())

    @property
    def digest(self) -> str:
        """A hash that is equal for two runs of one seed, and for no others."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Cancel everything, including dead nodes, so that no coroutine stays suspended."""
        self.dead.clear()
        self.frozen.clear()
        for task in self.tasks:
            task.cancel()
        unfinished = [task for task in self.tasks if not task.done()]
        if unfinished:
            self.run_until_complete(asyncio.wait(unfinished, timeout=60))
        super().close()

    # --- asyncio's loop interface

    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(context.get(NODE, "world"), handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_made += 1
        node = context.get(NODE, "world")
        heapq.heappush(self._timers, (when, self._timers_made, node, handle))
        return handle

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run at once: threads would add an order of their own."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when they are due."""

    def _run_once(self) -> None:
        for _ in range(TURNS):
            self._turn()
            if self._stopping:  # type: ignore[attr-defined]
                break

    def _turn(self) -> None:
        """Run some callbacks of one node, or let time pass."""
        frozen = self.frozen
        ready = [n for n, queue in self._queues.items() if queue and n not in frozen]
        if not ready:
            self._advance()
            return
        chance = self.random.random()
        node = ready[int(chance * len(ready))]
        queue = self._queues[node]
        for _ in range(1 + int(chance * 1e6) % 8):
            if not queue or node in frozen or node in self.dead:
                break
            handle = queue.popleft()
            if not handle._cancelled:
                self.now += STEP_S
                self.steps += 1
                handle._run()
        self._digest.update(b"%s %.6f" % (node.encode(), self.now))

    def _advance(self) -> None:
        """Let time pass until the next timer."""
        while self._timers:
            when, _, node, handle = heapq.heappop(self._timers)
            if handle._cancelled or node in self.dead:
                continue
            self.now = max(self.now, when)
            self._enqueue(node, handle)
            if node in self.frozen:
                continue
            while self._timers and self._timers[0][0] <= self.now:
                _, _, other, due = heapq.heappop(self._timers)
                self._enqueue(other, due)
            return
        raise RuntimeError("deadlock in the simulation: nothing is ready and no timer is set")

    def _enqueue(self, node: str, handle: asyncio.Handle) -> None:
        if node in self.dead:
            return
        queue = self._queues.get(node)
        if queue is None:
            queue = self._queues[node] = deque()
        queue.append(handle)

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T],
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coroutine, loop=loop, context=context)
        self.tasks.append(task)
        if len(self.tasks) > 4096:
            self.tasks = [task for task in self.tasks if not task.done()]
        return task

    def _on_exception(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(f"{NODE.get()}: {context['message']}: {error!r}")

    def _write_to_self(self) -> None:
        """No other thread wakes this loop."""

    def _process_events(self, event_list: object) -> None:
        """There is no selector."""
