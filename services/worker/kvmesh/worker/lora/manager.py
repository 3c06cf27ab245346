"""Loading, replacing and unloading the LoRA adapters of a running worker."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from kvmesh.bus.messages import (
    AdapterCommand,
    AdapterHost,
    ControlReply,
    LoadAdapter,
    TakeAdapter,
    UnloadAdapter,
    adapter_identity,
    adapter_name,
    is_adapter_name,
)
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.worker.capabilities import AdapterLoading
from kvmesh.worker.engine import Engine, Unsupported
from kvmesh.worker.lora.copies import AdapterCopies, CopyExchange
from kvmesh.worker.lora.engine_loads import EngineLoads
from kvmesh.worker.lora.folder import AdapterError, AdapterFolder, NoRoom, read_adapter
from kvmesh.worker.lora.table import AdapterTable, State

log = logging.getLogger(__name__)
RETIRE_S = 10.0
YIELD_S = 0.5  # for requests that routers have placed before they saw the card
POLL_S = 0.1
USES_S = 1.0  # between looks at which adapters have requests


class _Terms(NamedTuple):
    """An adapter is pinned, and replaces others; one that was idle for so long makes room."""

    pinned: bool
    replaces: bool = True
    idle_s: float = 0.0


class AdapterManager:
    """Executes adapter commands on the engine called `name`, one at a time.

    At most `max_adapters` are served. `users(identity)` counts the live requests of an adapter.
    `publish` puts the identities on the worker's card, with the `host`, and admits requests of the
    `admitted` ones only; it raises nothing. A replaced adapter stays on the card for `retire_s`
    seconds, for requests that frontends and routers hold. Files travel through the `exchange`, if
    any.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        max_adapters: int,
        users: Callable[[str], int],
        publish: Callable[[list[str]], Awaitable[None]],
        retire_s: float = RETIRE_S,
        exchange: CopyExchange | None = None,
    ) -> None:
        self._name = name
        self._max_adapters = max_adapters
        self._users = users
        self._publish = publish
        self._retire_s = retire_s
        self._model = ""
        self._table: AdapterTable | None = None
        self._lock = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._engine: EngineLoads | None = None
        if isinstance(engine, AdapterLoading):
            self._engine = EngineLoads(engine, self._tasks)
        self._copies: AdapterCopies | None = None
        if exchange is not None and self._engine is not None:
            self._copies = AdapterCopies(exchange, self._is_loaded)

    @property
    def host(self) -> AdapterHost | None:
        """The adapters' part of the card; None if routers cannot have any loaded here."""
        if self._table is None or self._copies is None:
            return None
        return AdapterHost(
            limit=self._table.limit if self._max_adapters else 0,
            removable=self._table.removable,
            files=self._copies.files,
        )

    @property
    def admitted(self) -> list[str]:
        """The identities of adapters whose requests are accepted."""
        return self._table.admitted if self._table is not None else []

    def has_yielded(self, identity: str) -> bool:
        """True if an adapter was unloaded of late to make room for another."""
        return self._table is not None and self._table.has_yielded(identity)

    def used(self, identity: str) -> None:
        """A request of an adapter was accepted."""
        if self._table is not None:
            self._table.used(identity, _now())

    def open(
        self, model: str, identities: list[str], folders: Mapping[str, Path] | None = None
    ) -> None:
        """Accept commands from now on; the engine has loaded these adapters of the model.

        `folders` are those of adapters by name, which are offered to other workers.
        """
        self._model = model
        self._table = AdapterTable(identities, max(self._max_adapters, len(identities)))
        if self._copies is not None:
            self._tasks.start(self._watch_uses(self._table), "uses of adapters")
            offering = self._offer_all(self._copies, self._table, folders or {})
            self._tasks.start(offering, "offer adapters")

    async def close(self) -> None:
        """Stop what is in progress."""
        await self._tasks.close()
        if self._copies is not None:
            self._copies.close()

    async def execute(self, command: AdapterCommand | TakeAdapter) -> ControlReply:
        """Execute a command; the reply comes within its timeout and names the adapter."""
        deadline = _now() + command.timeout_s
        try:
            engine, table = self._ready()
            match command:
                case LoadAdapter():
                    terms = _Terms(command.pinned)
                    identity = await self._load(engine, table, command, terms, deadline)
                case TakeAdapter(adapter=adapter, files=files, idle_s=idle_s):
                    terms = _Terms(pinned=False, replaces=False, idle_s=idle_s)
                    wanted = LoadAdapter(name=adapter_name(adapter), adapter=adapter, files=files)
                    identity = await self._load(engine, table, wanted, terms, deadline)
                case UnloadAdapter():
                    identity = await self._unload(engine, table, command.name, deadline)
        except Unsupported as error:
            return ControlReply(False, f"unsupported: {error}")
        except AdapterError as error:
            return ControlReply(False, str(error), no_room=isinstance(error, NoRoom))
        except TimeoutError:
            return ControlReply(False, f"another adapter command ran for {command.timeout_s:g} s")
        return ControlReply(True, adapter=identity)

    def _ready(self) -> tuple[EngineLoads, AdapterTable]:
        if self._engine is None:
            raise Unsupported(f"the {self._name} engine loads no adapters at run time")
        if self._table is None:
            raise AdapterError("the worker is starting")
        if not self._max_adapters:
            raise Unsupported("worker.max_adapters of this worker is 0")
        return self._engine, self._table

    def _is_loaded(self, identity: str) -> bool:
        return self._table is not None and self._table.state(identity) is not None

    # loading

    async def _load(
        self,
        engine: EngineLoads,
        table: AdapterTable,
        command: LoadAdapter,
        terms: _Terms,
        deadline: float,
    ) -> str:
        name = command.name
        if not is_adapter_name(name) or name == self._model:
            raise AdapterError(f"an adapter cannot have the name {name!r}")
        folder = await self._folder(engine, command, deadline)
        identity = adapter_identity(name, folder.digest)
        while not await self._try_load(engine, table, identity, folder, terms, deadline):
            if not _left(deadline):
                raise AdapterError(f"requests still use the adapter that {name} replaced before")
            await asyncio.sleep(POLL_S)
        log.info("serving adapter %s from %s", identity, folder.path)
        if self._copies is not None:
            if command.folder:
                await self._copies.offer(identity, folder)
            if terms.replaces:
                self._copies.supersede(identity)
            await self._publish(table.listed)
        return identity

    async def _folder(
        self, engine: EngineLoads, command: LoadAdapter, deadline: float
    ) -> AdapterFolder:
        if command.folder or not command.adapter:
            return await _read(command.folder, engine.max_rank, deadline)
        if self._copies is None:
            raise Unsupported("weights.share of this worker is off")
        if adapter_name(command.adapter) != command.name:
            raise AdapterError(f"{command.adapter} is not called {command.name}")
        return await self._copies.take(command.adapter, command.files, engine.max_rank, deadline)

    async def _try_load(
        self,
        engine: EngineLoads,
        table: AdapterTable,
        identity: str,
        folder: AdapterFolder,
        terms: _Terms,
        deadline: float,
    ) -> bool:
        """Load and serve an adapter; False if it fits only once a replaced one has left."""
        async with asyncio.timeout_at(deadline):
            await self._lock.acquire()
        try:
            if not terms.replaces and table.other_served(identity):
                raise AdapterError(f"another adapter is called {adapter_name(identity)} here")
            if table.is_full(identity):
                await self._make_room(engine, table, terms.idle_s)
            if not table.can_load(identity):
                return False
            if table.state(identity) in (None, State.LEAVING):
                seconds = await engine.load(identity, folder, deadline)
                if self._copies is not None:
                    self._copies.took(identity, seconds)
            if replaced := table.serve(identity):
                self._tasks.start(self._retire(engine, table, replaced), "retire adapter")
            if terms.pinned:
                table.pin(identity)
            table.used(identity, _now())
            await self._publish(table.listed)
        finally:
            self._lock.release()
        return True

    async def _make_room(self, engine: EngineLoads, table: AdapterTable, idle_s: float) -> None:
        """Unload the least recently used adapter that nobody has pinned; raises NoRoom."""
        busy = {identity for identity in table.removable if self._users(identity)}
        identity = table.least_used(_now(), idle_s, busy)
        table.yields(identity)
        await self._publish(table.listed)
        await asyncio.sleep(YIELD_S)
        if count := self._users(identity):
            table.serve(identity)
            await self._publish(table.listed)
            raise NoRoom(f"{count} requests have just begun to use {identity}")
        try:
            await engine.unload(identity)
        except AdapterError:
            table.leave(identity)
            raise
        table.remove(identity)
        log.info("unloaded adapter %s to make room", identity)

    async def _offer_all(
        self, copies: AdapterCopies, table: AdapterTable, folders: Mapping[str, Path]
    ) -> None:
        """Offer the adapters of the settings, one after the other."""
        for name, path in folders.items():
            try:
                folder = await asyncio.to_thread(read_adapter, path)
            except AdapterError as error:
                log.warning("an adapter is not offered to other workers: %s", error)
                continue
            identity = adapter_identity(name, folder.digest)
            if self._is_loaded(identity):
                await copies.offer(identity, folder)
                await self._publish(table.listed)

    # uses

    async def _watch_uses(self, table: AdapterTable) -> None:
        while True:
            await asyncio.sleep(USES_S)
            self._note_uses(table)

    def _note_uses(self, table: AdapterTable) -> None:
        now = _now()
        for identity in table.removable:
            if self._users(identity):
                table.used(identity, now)

    # unloading

    async def _unload(
        self, engine: EngineLoads, table: AdapterTable, name: str, deadline: float
    ) -> str:
        async with asyncio.timeout_at(deadline):
            await self._lock.acquire()
        try:
            identity = await self._unload_served(engine, table, name, deadline)
            if self._copies is not None:
                identity = self._copies.withdraw(name) or identity
                await self._publish(table.listed)
        finally:
            self._lock.release()
        if not identity:
            raise AdapterError(f"there is no adapter {name}")
        log.info("unloaded adapter %s", identity)
        return identity

    async def _unload_served(
        self, engine: EngineLoads, table: AdapterTable, name: str, deadline: float
    ) -> str:
        """Unload the adapter that is served under a name; empty if there is none."""
        if not table.serves(name):
            return ""
        identity = table.withdraw(name)
        await self._publish(table.listed)
        if count := await self._users_left(identity, deadline):
            table.serve(identity)
            await self._publish(table.listed)
            raise AdapterError(f"{count} requests still use {name}; it stays loaded")
        await engine.unload(identity)
        table.remove(identity)
        return identity

    async def _users_left(self, identity: str, deadline: float) -> int:
        """Wait until an adapter has no requests; return how many it has at the deadline."""
        while (count := self._users(identity)) and _left(deadline):
            await asyncio.sleep(min(POLL_S, _left(deadline)))
        return count

    async def _retire(self, engine: EngineLoads, table: AdapterTable, identity: str) -> None:
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
                        await engine.unload(identity)
                    except AdapterError as error:
                        log.warning("a replaced adapter stays loaded: %s", error)
                    else:
                        table.remove(identity)
                        if self._copies is not None:
                            self._copies.withdraw_one(identity)
                            await self._publish(table.listed)
                        log.info("unloaded the replaced adapter %s", identity)
                    return
            await asyncio.sleep(POLL_S)


async def _read(folder: str, max_rank: int, deadline: float) -> AdapterFolder:
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.to_thread(read_adapter, Path(folder), max_rank)
    except TimeoutError:
        raise AdapterError(f"reading {folder} took too long") from None


def _now() -> float:
    return asyncio.get_running_loop().time()


def _left(deadline: float) -> float:
    return max(0.0, deadline - _now())
