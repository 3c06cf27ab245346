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
from kvmesh.worker.lora.departures import Departures
from kvmesh.worker.lora.engine_loads import EngineLoads
from kvmesh.worker.lora.folder import AdapterError, AdapterFolder, NoRoom, read_adapter
from kvmesh.worker.lora.table import AdapterTable, State

log = logging.getLogger(__name__)
RETIRE_S = 10.0
POLL_S = 0.1
USES_S = 1.0  # between looks at which adapters have requests


class _Terms(NamedTuple):
    """An adapter is pinned, and replaces others; one that was idle for so long makes room."""

    pinned: bool
    replaces: bool = True
    idle_s: float = 0.0


class _Running(NamedTuple):
    """The parts of a manager once the engine has started."""

    engine: EngineLoads
    table: AdapterTable
    departures: Departures


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
        self._running: _Running | None = None
        self._lock = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._engine: EngineLoads | None = None
        if isinstance(engine, AdapterLoading):
            self._engine = EngineLoads(engine, self._tasks)
        self._copies: AdapterCopies | None = None
        if exchange is not None and self._engine is not None:
            self._copies = AdapterCopies(exchange, self._is_loaded, self._publish_listed)

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
        if self._engine is not None:
            departures = Departures(
                self._engine, self._table, self._copies, self._users, self._publish, self._lock
            )
            self._running = _Running(self._engine, self._table, departures)
        if self._copies is not None:
            self._tasks.start(self._watch_uses(self._table), "uses of adapters")
            offering = self._offer_all(self._copies, self._table, folders or {})
            self._tasks.start(offering, "offer adapters")

    async def leave(self) -> None:
        """Before the engine sleeps: unload what the settings do not name, as a restart would."""
        if self._running is None:
            return
        engine, table, _ = self._running
        await engine.settle()
        for identity in table.added:
            try:
                await engine.unload(identity)
            except AdapterError as error:
                log.warning("an adapter stays in the engine: %s", error)

    async def close(self) -> None:
        """Stop what is in progress."""
        await self._tasks.close()
        if self._copies is not None:
            await self._copies.close()

    async def execute(self, command: AdapterCommand | TakeAdapter) -> ControlReply:
        """Execute a command; the reply comes within its timeout and names the adapter."""
        deadline = _now() + command.timeout_s
        try:
            running = self._ready()
            match command:
                case LoadAdapter():
                    terms = _Terms(command.pinned)
                    identity = await self._load(running, command, terms, deadline)
                case TakeAdapter(adapter=adapter, files=files, idle_s=idle_s):
                    terms = _Terms(pinned=False, replaces=False, idle_s=idle_s)
                    wanted = LoadAdapter(name=adapter_name(adapter), adapter=adapter, files=files)
                    identity = await self._load(running, wanted, terms, deadline)
                case UnloadAdapter():
                    identity = await self._unload(running, command.name, deadline)
        except Unsupported as error:
            return ControlReply(False, f"unsupported: {error}")
        except AdapterError as error:
            return ControlReply(False, str(error), no_room=isinstance(error, NoRoom))
        except TimeoutError:
            return ControlReply(False, f"another adapter command ran for {command.timeout_s:g} s")
        return ControlReply(True, adapter=identity)

    def _ready(self) -> "_Running":
        if self._engine is None:
            raise Unsupported(f"the {self._name} engine loads no adapters at run time")
        if self._running is None:
            raise AdapterError("the worker is starting")
        if not self._max_adapters:
            raise Unsupported("worker.max_adapters of this worker is 0")
        return self._running

    async def _publish_listed(self) -> None:
        if self._table is not None:
            await self._publish(self._table.listed)

    def _is_loaded(self, identity: str) -> bool:
        return self._table is not None and self._table.state(identity) is not None

    # loading

    async def _load(
        self, running: _Running, command: LoadAdapter, terms: _Terms, deadline: float
    ) -> str:
        name = command.name
        if not is_adapter_name(name) or name == self._model:
            raise AdapterError(f"an adapter cannot have the name {name!r}")
        folder = await self._folder(running.engine, command, deadline)
        identity = adapter_identity(name, folder.digest)
        while not await self._try_load(running, identity, folder, terms, deadline):
            if _now() >= deadline:
                raise AdapterError(f"requests still use the adapter that {name} replaced before")
            await asyncio.sleep(POLL_S)
        log.info("serving adapter %s from %s", identity, folder.path)
        if self._copies is not None:
            if command.folder:
                await self._copies.offer(identity, folder)
            if terms.replaces:
                self._copies.supersede(identity)
            await self._publish(running.table.listed)
        return identity

    async def _folder(
        self, engine: EngineLoads, command: LoadAdapter, deadline: float
    ) -> AdapterFolder:
        if command.folder:
            return await _read(command.folder, engine.max_rank, deadline)
        if not command.adapter:
            raise AdapterError("the command names neither a folder nor an adapter")
        if self._copies is None:
            raise Unsupported("weights.share of this worker is off")
        if adapter_name(command.adapter) != command.name:
            raise AdapterError(f"{command.adapter} is not called {command.name}")
        return await self._copies.take(command.adapter, command.files, engine.max_rank, deadline)

    async def _try_load(
        self,
        running: _Running,
        identity: str,
        folder: AdapterFolder,
        terms: _Terms,
        deadline: float,
    ) -> bool:
        """Load and serve an adapter; False if it fits only once a replaced one has left."""
        engine, table, departures = running
        async with asyncio.timeout_at(deadline):
            await self._lock.acquire()
        try:
            if not terms.replaces and table.other_served(identity):
                raise AdapterError(f"another adapter is called {adapter_name(identity)} here")
            if table.is_full(identity):
                await departures.make_room(terms.idle_s)
            if not table.can_load(identity):
                await departures.unload_left()
                return False
            if table.state(identity) in (None, State.LEAVING):
                seconds = await engine.load(identity, folder, deadline)
                if self._copies is not None:
                    self._copies.took(identity, seconds)
            if replaced := table.serve(identity):
                retiring = departures.retire(replaced, self._retire_s)
                self._tasks.start(retiring, "retire adapter")
            if terms.pinned:
                table.pin(identity)
            table.used(identity, _now())
            await self._publish(table.listed)
        finally:
            self._lock.release()
        return True

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

    async def _watch_uses(self, table: AdapterTable) -> None:
        while True:
            await asyncio.sleep(USES_S)
            for identity in table.removable:
                if self._users(identity):
                    table.used(identity, _now())

    # unloading

    async def _unload(self, running: _Running, name: str, deadline: float) -> str:
        async with asyncio.timeout_at(deadline):
            await self._lock.acquire()
        try:
            identity = await running.departures.unload(name, deadline)
            if self._copies is not None:
                offered = self._copies.withdraw(name)
                identity = identity or offered
                await self._publish(running.table.listed)
        finally:
            self._lock.release()
        if not identity:
            raise AdapterError(f"there is no adapter {name}")
        log.info("unloaded adapter %s", identity)
        return identity


async def _read(folder: str, max_rank: int, deadline: float) -> AdapterFolder:
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.to_thread(read_adapter, Path(folder), max_rank)
    except TimeoutError:
        raise AdapterError(f"reading {folder} took too long") from None


def _now() -> float:
    return asyncio.get_running_loop().time()
