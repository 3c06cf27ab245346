"""Adapters that leave an engine: unloaded by command, replaced, or making room for others."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvmesh.worker.lora.copies import AdapterCopies
from kvmesh.worker.lora.engine_loads import EngineLoads
from kvmesh.worker.lora.folder import AdapterError, NoRoom
from kvmesh.worker.lora.table import AdapterTable, State

log = logging.getLogger(__name__)
YIELD_S = 0.5  # for requests that routers have placed before they saw the card
POLL_S = 0.1


class Departures:
    """Takes adapters off the card, waits for their requests, and unloads them.

    `users` and `publish` are as in AdapterManager. The caller holds the `lock` unless it is said.
    """

    def __init__(
        self,
        engine: EngineLoads,
        table: AdapterTable,
        copies: AdapterCopies | None,
        users: Callable[[str], int],
        publish: Callable[[list[str]], Awaitable[None]],
        lock: asyncio.Lock,
    ) -> None:
        self._engine = engine
        self._table = table
        self._copies = copies
        self._users = users
        self._publish = publish
        self._lock = lock

    async def make_room(self, idle_s: float) -> None:
        """Unload the least recently used adapter that was idle for `idle_s` seconds.

        Raises NoRoom, or AdapterError if the engine does not unload it.
        """
        table, now = self._table, asyncio.get_running_loop().time()
        busy = {identity for identity in table.removable if self._users(identity)}
        identity = table.least_used(now, idle_s, busy)
        table.yields(identity)
        await self._publish(table.listed)
        await asyncio.sleep(YIELD_S)
        if count := self._users(identity):
            table.serve(identity)
            await self._publish(table.listed)
            raise NoRoom(f"{count} requests have just begun to use {identity}")
        try:
            await self._engine.unload(identity)
        except AdapterError:
            table.leave(identity)
            raise
        table.remove(identity)
        log.info("unloaded adapter %s to make room", identity)

    async def unload_left(self) -> None:
        """Unload those that the engine did not unload before; raises AdapterError."""
        for identity in self._table.leaving:
            if not self._users(identity):
                await self._engine.unload(identity)
                self._table.remove(identity)

    async def unload(self, name: str, deadline: float) -> str:
        """Unload the adapter that is served under a name, and return it; empty if there is none.

        Raises AdapterError if it still has requests at `deadline`, by the loop's clock.
        """
        table = self._table
        if not table.serves(name):
            return ""
        identity = table.withdraw(name)
        await self._publish(table.listed)
        if count := await self._users_left(identity, deadline):
            table.serve(identity)
            await self._publish(table.listed)
            raise AdapterError(f"{count} requests still use {name}; it stays loaded")
        await self._engine.unload(identity)
        table.remove(identity)
        return identity

    async def retire(self, identity: str, after_s: float) -> None:
        """Unload a replaced adapter after its last request, unless it is served again.

        It stays on the card for `after_s` seconds. The caller must not hold the lock.
        """
        table = self._table
        await asyncio.sleep(after_s)
        async with self._lock:
            if table.state(identity) is State.REPLACED:
                table.leave(identity)
                await self._publish(table.listed)
        while table.state(identity) is State.LEAVING:
            async with self._lock:
                if table.state(identity) is State.LEAVING and not self._users(identity):
                    await self._unload_replaced(identity)
                    return
            await asyncio.sleep(POLL_S)

    async def _unload_replaced(self, identity: str) -> None:
        try:
            await self._engine.unload(identity)
        except AdapterError as error:
            log.warning("a replaced adapter stays loaded: %s", error)
            return
        self._table.remove(identity)
        if self._copies is not None:
            self._copies.withdraw_one(identity)
            await self._publish(self._table.listed)
        log.info("unloaded the replaced adapter %s", identity)

    async def _users_left(self, identity: str, deadline: float) -> int:
        """Wait until an adapter has no requests; return how many it has at the deadline."""
        clock = asyncio.get_running_loop().time
        while (count := self._users(identity)) and (left := deadline - clock()) > 0:
            await asyncio.sleep(min(POLL_S, left))
        return count
