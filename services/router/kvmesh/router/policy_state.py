"""Learned state of a policy, shared between replicas and over restarts through a KV bucket."""

import asyncio
import contextlib
import logging
import time

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.bus.subjects import untoken
from kvmesh.router.placement.router import RouterCore

log = logging.getLogger(__name__)
PUBLISH_S = 2.0
FRESH_S = 24 * 3600.0


class PolicyState:
    """Publishes the state of one model's policy when it changes; merges that of other routers.

    Keys hold the router's name, which is stable over restarts.
    """

    def __init__(self, bus: Bus, name: str, core: RouterCore) -> None:
        subjects, model = bus.subjects, core.model
        self._bus = bus
        self._name = name
        self._core = core
        self._key = subjects.bandit_key(model, name)
        self._prefix = f"$KV.{subjects.router_bucket}.{subjects.bandit_key(model, '')}"
        self._last: bytes | None = None
        self._failing = False
        self._reader = StreamReader(
            bus,
            f"KV_{subjects.router_bucket}",
            f"{self._prefix}>",
            self._on_state,
            Start(last_per_subject=True),
        )

    async def run(self) -> None:
        """Restore this router's state, then publish changes until cancelled."""
        await self._reader.open()
        try:
            with contextlib.suppress(TimeoutError):  # stored states are then merged as they arrive
                async with asyncio.timeout(5):
                    await self._reader.caught_up.wait()
            while True:
                await self._publish()
                await asyncio.sleep(PUBLISH_S)
        finally:
            await self._reader.close()

    async def _publish(self) -> None:
        state = self._core.policies.state()
        if state is None or state == self._last:
            return
        try:
            bucket = await self._bus.js.key_value(self._bus.subjects.router_bucket)
            await bucket.put(self._key, state)
            self._last, self._failing = state, False
        except BusError as error:
            if not self._failing:
                log.warning("cannot publish the policy's state, retrying: %s", cause(error))
            self._failing = True

    def _on_state(self, message: StreamMessage) -> None:
        router = untoken(message.subject.removeprefix(self._prefix))
        own = router == self._name
        if not message.data or (own and self._last is not None):
            return
        if time.time() - message.time > FRESH_S:
            return
        try:
            self._core.policies.merge(router, message.data, own)
        except ValueError as error:
            log.warning("ignored the policy state of %s: %s", router, error)
