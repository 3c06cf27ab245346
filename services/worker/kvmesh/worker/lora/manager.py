"""Loading, replacing and unloading the LoRA adapters of a running worker."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvmesh.bus.messages import (
    AdapterCommand,
    ControlReply,
    LoadAdapter,
    UnloadAdapter,
    adapter_identity,
    is_adapter_name,
)
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.worker.capabilities import AdapterLoading
from kvmesh.worker.engine import Engine, Unsupported
from kvmesh.worker.lora.folder import AdapterError, AdapterFolder, read_adapter
from kvmesh.worker.lora.table import AdapterTable, State

log = logging.getLogger(__name__)
RETIRE_S = 10.0
POLL_S = 0.1
UNLOAD_S = 60.0


class AdapterManager:
    """Executes adapter commands on the engine called `name`, one at a time.

    At most `max_adapters` are served. `users(identity)` counts the live requests of an adapter.
    `publish` puts the identities on the worker's card and admits requests of these only; it raises
    nothing. A replaced adapter stays on the card for `retire_s` seconds, for requests that
    frontends and routers hold.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        max_adapters: int,
        users: Callable[[str], int],
        publish: Callable[[list[str]], Awaitable[None]],
        retire_s: float = RETIRE_S,
    ) -> None:
        self._engine = engine
        self._name = name
        self._max_adapters = max_adapters
        self._users = users
        self._publish = publish
        self._retire_s = retire_s
        self._model = ""
        self._table: AdapterTable | None = None
        self._lock = asyncio.Lock()
        self._late: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()

    def open(self, model: str, identities: list[str]) -> None:
        """Accept commands from now on; the engine has loaded these adapters of the model."""
        self._model = model
        self._table = AdapterTable(identities, max(self._max_adapters, len(identities)))

    async def close(self) -> None:
        """Stop what is in progress."""
        await self._tasks.close()

    async def execute(self, command: AdapterCommand) -> ControlReply:
        """Execute a command; the reply comes within its timeout and names the adapter."""
        deadline = _now() + command.timeout_s
        try:
            engine, table = self._ready()
            match command:
                case LoadAdapter():
                    identity = await self._load(engine, table, command, deadline)
                case UnloadAdapter():
                    identity = await self._unload(engine, table, command.name, deadline)
        except Unsupported as error:
            return ControlReply(False, f"unsupported: {error}")
        except AdapterError as error:
            return ControlReply(False, str(error))
        except TimeoutError:
            return ControlReply(False, f"another adapter command ran for {command.timeout_s:g} s")
        return ControlReply(True, adapter=identity)

    def _ready(self) -> tuple[AdapterLoading, AdapterTable]:
        if not isinstance(self._engine, AdapterLoading):
            raise Unsupported(f"the {self._name} engine loads no adapters at run time")
        if self._table is None:
            raise AdapterError("the worker is starting")
        if not self._max_adapters:
            raise Unsupported("worker.max_adapters of this worker is 0")
        return self._engine, self._table

    async def _load(
        self, engine: AdapterLoading, table: AdapterTable, command: LoadAdapter, deadline: float
    ) -> str:
        name = command.name
        if not is_adapter_name(name) or name == self._model:
            raise AdapterError(f"an adapter cannot have the name {name!r}")
        folder = await _read(command, engine.max_adapter_rank(), deadline)
        identity = adapter_identity(name, folder.digest)
        while not await self._try_load(engine, table, identity, folder, deadline):
            if not _left(deadline):
                raise AdapterError(f"requests still use the adapter that {name} replaced before")
            await asyncio.sleep(POLL_S)
        log.info("serving adapter %s from %s", identity, folder.path)
        return identity

    async def _try_load(
        self,
        engine: AdapterLoading,
        table: AdapterTable,
        identity: str,
        folder: AdapterFolder,
        deadline: float,
    ) -> bool:
        """Load and serve an adapter; False if it fits only once a replaced one has left."""
        async with asyncio.timeout_at(deadline):
            await self._lock.acquire()
        try:
            if not table.can_load(identity):
                return False
            if table.state(identity) in (None, State.LEAVING):
                await self._load_into(engine, identity, folder, deadline)
            if replaced := table.serve(identity):
                self._tasks.start(self._retire(engine, table, replaced), "retire adapter")
            await self._publish(table.listed)
        finally:
            self._lock.release()
        return True

    async def _load_into(
        self, engine: AdapterLoading, identity: str, folder: AdapterFolder, deadline: float
    ) -> None:
        if self._late is not None and not self._late.done():
            raise AdapterError("the engine is still loading an adapter whose time was over")
        loading = self._tasks.start(engine.load_adapter(identity, folder.path), awaited=True)
        done, _ = await asyncio.wait([loading], timeout=_left(deadline))
        if not done:
            self._late = self._tasks.start(_undo(engine, identity, loading), "undo adapter load")
            raise AdapterError("the engine did not load it in time, and will unload it")
        loading.result()
        if not folder.is_unchanged():
            await engine.unload_adapter(identity)
            raise AdapterError(f"{folder.path} was changed while the engine read it")

    async def _unload(
        self, engine: AdapterLoading, table: AdapterTable, name: str, deadline: float
    ) -> str:
        async with asyncio.timeout_at(deadline):
            await self._lock.acquire()
        try:
            identity = table.withdraw(name)
            await self._publish(table.listed)
            if count := await self._users_left(identity, deadline):
                table.serve(identity)
                await self._publish(table.listed)
                raise AdapterError(f"{count} requests still use {name}; it stays loaded")
            await self._unload_from(engine, table, identity)
        finally:
            self._lock.release()
        log.info("unloaded adapter %s", identity)
        return identity

    async def _users_left(self, identity: str, deadline: float) -> int:
        """Wait until an adapter has no requests; return how many it has at the deadline."""
        while (count := self._users(identity)) and _left(deadline):
            await asyncio.sleep(min(POLL_S, _left(deadline)))
        return count

    async def _unload_from(
        self, engine: AdapterLoading, table: AdapterTable, identity: str
    ) -> None:
        """Unload an adapter without requests; one that the engine keeps gets none either."""
        try:
            async with asyncio.timeout(UNLOAD_S):
                await engine.unload_adapter(identity)
        except TimeoutError:
            raise AdapterError(f"the engine did not unload {identity} in {UNLOAD_S:g} s") from None
        table.remove(identity)

    async def _retire(self, engine: AdapterLoading, table: AdapterTable, identity: str) -> None:
        """Unload a replaced adapter after its last request, unless it is served again."""
        await asyncio.sleep(self._retire_s)
        async with self._lock:
            if table.state(identity) is State.REPLACED:
                table.leave(identity)
                await self._publish(table.listed)
        while table.state(identity) is State.LEAVING:
            async with self._lock:
                if table.state(identity) is State.LEAVING and not self._users(identity):
                    try:
                        await self._unload_from(engine, table, identity)
                    except AdapterError as error:
                        log.warning("a replaced adapter stays loaded: %s", error)
                    else:
                        log.info("unloaded the replaced adapter %s", identity)
                    return
            await asyncio.sleep(POLL_S)


async def _read(command: LoadAdapter, max_rank: int, deadline: float) -> AdapterFolder:
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.to_thread(read_adapter, Path(command.folder), max_rank)
    except TimeoutError:
        raise AdapterError(f"reading {command.folder} took too long") from None


async def _undo(engine: AdapterLoading, identity: str, loading: "asyncio.Task[None]") -> None:
    """Unload an adapter whose load ended after its command's timeout."""
    try:
        await loading
        await engine.unload_adapter(identity)
    except AdapterError as error:
        log.warning("adapter %s, whose loading took too long: %s", identity, error)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _left(deadline: float) -> float:
    return max(0.0, deadline - _now())
