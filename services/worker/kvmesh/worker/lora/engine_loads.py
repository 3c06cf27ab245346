"""Loading of adapters into an engine, and their unloading, within deadlines."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from kvmesh.runtime.background import BackgroundTasks
from kvmesh.worker.capabilities import AdapterLoading
from kvmesh.worker.lora.folder import AdapterError, AdapterFolder

log = logging.getLogger(__name__)
UNLOAD_S = 60.0


class EngineLoads:
    """Calls of one engine. `tasks` end with the worker."""

    def __init__(self, engine: AdapterLoading, tasks: BackgroundTasks) -> None:
        self._engine = engine
        self._tasks = tasks
        self._late: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def max_rank(self) -> int:
        """The largest rank of an adapter; 0 if the engine states none."""
        return self._engine.max_adapter_rank()

    async def load(self, identity: str, folder: AdapterFolder, deadline: float) -> float:
        """Load an adapter, by `deadline` on the loop's clock; returns the seconds it took.

        Raises AdapterError or Unsupported. The engine unloads what it has loaded too late.
        """
        if self._late is not None and not self._late.done():
            raise AdapterError("the engine is still loading an adapter whose time was over")
        clock = asyncio.get_running_loop().time
        began = clock()
        loading = self._call(self._engine.load_adapter(identity, folder.path))
        done, _ = await asyncio.wait([loading], timeout=max(deadline - began, 0.0))
        if not done:
            self._late = self._call(self._undo(identity, loading))
            raise AdapterError("the engine did not load it in time, and will unload it")
        loading.result()
        if not folder.is_unchanged():
            await self._engine.unload_adapter(identity)
            raise AdapterError(f"{folder.path} was changed while the engine read it")
        return clock() - began

    async def unload(self, identity: str) -> None:
        """Unload an adapter without requests; raises AdapterError."""
        try:
            async with asyncio.timeout(UNLOAD_S):
                await asyncio.shield(self._call(self._engine.unload_adapter(identity)))
        except TimeoutError:
            raise AdapterError(f"the engine did not unload {identity} in {UNLOAD_S:g} s") from None

    async def settle(self) -> None:
        """Wait for calls that have begun, for at most UNLOAD_S seconds."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=UNLOAD_S)

    def _call(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.start(call, awaited=True)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _undo(self, identity: str, loading: "asyncio.Task[None]") -> None:
        """Unload an adapter whose load ended after its command's timeout."""
        try:
            await loading
            await self._engine.unload_adapter(identity)
        except AdapterError as error:
            log.warning("adapter %s, whose loading took too long: %s", identity, error)
