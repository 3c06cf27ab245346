"""Limits that hold over a whole mesh: frontends tell each other what their callers use."""

import asyncio

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import KeyUse, LimitUse
from kvmesh.frontend.auth.accounts import Accounts

INTERVAL_S = 0.01
HEARTBEAT_S = 0.5
MOST = 2000  # keys in a message
_decoder = msgspec.msgpack.Decoder(LimitUse)


class SharedLimits:
    """Tells what changed each `INTERVAL_S`, and all that is not idle each `HEARTBEAT_S`.

    Nothing waits for an answer: numbers are totals, so that one that is lost is made up for by the
    next.
    """

    def __init__(self, bus: Bus, instance: str, accounts: Accounts) -> None:
        self._bus = bus
        self._instance = instance
        self._accounts = accounts
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._told_all = 0.0

    async def open(self) -> None:
        """Begin to listen, and ask for what the others know."""
        await self._bus.subscribe(self._bus.subjects.limits, _decoder, self._heard)
        self._bus.post(self._bus.subjects.limits, LimitUse(self._instance, request_all=True))

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            now = self._loop.time()
            if now - self._told_all >= HEARTBEAT_S:
                self._tell_all()
            elif self._accounts.changed:
                changed = list(self._accounts.changed)
                self._tell([account.use(now) for account in changed])

    def _tell_all(self) -> None:
        now = self._told_all = self._loop.time()
        accounts = [account for account in self._accounts if account.key.limited]
        busy = [a for a in accounts if a in self._accounts.changed or not a.idle(now)]
        self._tell([account.use(now) for account in busy])

    def _tell(self, uses: list[KeyUse]) -> None:
        self._accounts.changed.clear()
        for start in range(0, len(uses), MOST):
            told = LimitUse(self._instance, uses[start : start + MOST], self._age)
            self._bus.post(self._bus.subjects.limits, told)

    def _heard(self, said: LimitUse) -> None:
        if said.frontend == self._instance:
            return
        self._accounts.hear(said, self._loop.time(), self._age)
        if said.request_all:
            self._tell_all()

    @property
    def _age(self) -> float:
        return self._loop.time() - self._began
