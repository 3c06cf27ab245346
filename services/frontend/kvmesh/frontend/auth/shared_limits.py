"""Mesh-wide rate limits: frontends report the use of their keys to each other."""

import asyncio

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import KeyUse, LimitUse, MessageDecoder
from kvmesh.bus.ticks import next_tick
from kvmesh.frontend.auth.accounts import Accounts

INTERVAL_S = 0.01
HEARTBEAT_S = 0.5
MAX_KEYS_PER_MESSAGE = 2000  # keys in a message
_decoder = MessageDecoder(LimitUse)


class SharedLimits:
    """Reports changed accounts every `INTERVAL_S` and all busy ones every `HEARTBEAT_S`.

    Reports are not acknowledged: they carry totals, so the next one makes up for a lost one.
    """

    def __init__(self, bus: Bus, instance: str, accounts: Accounts) -> None:
        self._bus = bus
        self._instance = instance
        self._accounts = accounts
        self._any = asyncio.Event()  # changed account
        accounts.changed.on_first = self._any.set
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._last_full_report = 0.0

    async def open(self) -> None:
        """Subscribe to reports, and request those of the other frontends."""
        await self._bus.subscribe(self._bus.subjects.limits, _decoder, self._receive)
        self._bus.post(self._bus.subjects.limits, LimitUse(self._instance, request_all=True))

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            if not self._accounts.changed:
                self._any.clear()
                await next_tick(HEARTBEAT_S, self._any)
            await asyncio.sleep(INTERVAL_S)
            now = self._loop.time()
            if now - self._last_full_report >= HEARTBEAT_S - INTERVAL_S:
                self._report_all()
            elif self._accounts.changed:
                changed = list(self._accounts.changed)
                self._report([account.report(now) for account in changed])

    def _report_all(self) -> None:
        now = self._last_full_report = self._loop.time()
        accounts = [account for account in self._accounts if account.key.limited]
        busy = [a for a in accounts if a in self._accounts.changed or not a.idle(now)]
        self._report([account.report(now) for account in busy])

    def _report(self, uses: list[KeyUse]) -> None:
        self._accounts.changed.clear()
        for start in range(0, len(uses), MAX_KEYS_PER_MESSAGE):
            report = LimitUse(self._instance, uses[start : start + MAX_KEYS_PER_MESSAGE], self._age)
            self._bus.post(self._bus.subjects.limits, report)

    def _receive(self, report: LimitUse) -> None:
        if report.frontend == self._instance:
            return
        self._accounts.receive(report, self._loop.time(), self._age)
        if report.request_all:
            self._report_all()

    @property
    def _age(self) -> float:
        return self._loop.time() - self._started
