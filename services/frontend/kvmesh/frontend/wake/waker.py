"""Waits for the first worker of an idle model; posts the wakes that have the planner start it."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Wake
from kvmesh.bus.ticks import next_tick
from kvmesh.frontend import metrics
from kvmesh.frontend.errors import Overloaded, Unavailable

TICK_S = 0.1
RETRY_AFTER_S = 10.0  # the worker still starts, so a retry may find it
INTERVAL_S = 1.0  # between two wakes of one model, at least
REPEAT_S = 3.0  # a planner that restarts learns of the waiting sequences within this time


@dataclass
class _Model:
    """Prompt tokens by sequence, oldest first; `changed` since the last wake, at `posted_at`."""

    posted_at: float
    tokens: dict[str, int] = field(default_factory=dict)
    changed: bool = True

    def due(self, now: float) -> bool:
        since = now - self.posted_at
        return bool(self.tokens) and since >= (INTERVAL_S if self.changed else REPEAT_S)


class WaitingSequences:
    """At most `limit` waiting sequences of all idle models in one frontend.

    Times are on the loop's clock.
    """

    def __init__(self, frontend: str, limit: int) -> None:
        self._frontend = frontend
        self._limit = limit
        self._models: dict[str, _Model] = {}

    def counts(self) -> dict[str, int]:
        """The number of waiting sequences of each model that had some recently."""
        return {name: len(model.tokens) for name, model in self._models.items()}

    def add(self, model: str, sequence: str, tokens: int, now: float) -> None:
        """Count a sequence with a prompt of `tokens` tokens; raises Overloaded at the limit."""
        if sum(self.counts().values()) >= self._limit:
            raise Overloaded(f"Too many requests wait for a worker of `{model}`.")
        entry = self._models.setdefault(model, _Model(now - INTERVAL_S))
        entry.tokens[sequence] = tokens
        entry.changed = True

    def remove(self, model: str, sequence: str) -> None:
        """Uncount a sequence, which waits no more."""
        self._models[model].tokens.pop(sequence, None)

    def due(self, now: float, time: float) -> list[Wake]:
        """The wakes to post now; `time` is the Unix time. Forgets models without waiting sequences.

        Each model has one at most every INTERVAL_S, and one every REPEAT_S while sequences wait.
        """
        wakes = []
        for name, model in list(self._models.items()):
            if model.due(now):
                model.posted_at, model.changed = now, False
                wakes.append(self._wake(name, model.tokens, time))
            elif not model.tokens and now - model.posted_at >= INTERVAL_S:
                del self._models[name]
        return wakes

    def _wake(self, model: str, tokens: dict[str, int], time: float) -> Wake:
        return Wake(
            model=model,
            frontend=self._frontend,
            request=next(iter(tokens)),
            waiting=len(tokens),
            tokens=sum(tokens.values()),
            time=time,
        )


class IdleModelTable(Protocol):
    """The models that may run without workers."""

    def may_idle(self, model: str) -> bool:
        """True if requests of the model wait while it has no worker."""
        ...

    def is_idle(self, model: str) -> bool:
        """True if such a model has no worker now."""
        ...


class Waker:
    """All sequences of one frontend that wait for a worker of an idle model."""

    def __init__(self, bus: Bus, frontend: str, models: IdleModelTable, limit: int) -> None:
        self._bus = bus
        self._models = models
        self._waiting = WaitingSequences(frontend, limit)
        self._ends: dict[str, asyncio.Event] = {}
        self._any = asyncio.Event()  # sequence that waits
        self._stopping = False
        self._loop = asyncio.get_running_loop()

    def may_idle(self, model: str) -> bool:
        """True if requests of the model wait while it has no worker."""
        return self._models.may_idle(model)

    def is_idle(self, model: str) -> bool:
        """True if the model has no worker and requests wait for one."""
        return self._models.is_idle(model)

    async def wait(self, model: str, sequence: str, tokens: int, deadline: float) -> None:
        """Return once the model has a worker, or may no longer run without one.

        `tokens` counts those of the prompt, `deadline` is on the loop's clock. Raises Overloaded if
        too many sequences wait, Unavailable at the deadline or when the frontend stops.
        """
        self._waiting.add(model, sequence, tokens, self._loop.time())
        self._any.set()
        try:
            self._post()
            async with asyncio.timeout_at(deadline):
                while self.is_idle(model):
                    if self._stopping:
                        raise Unavailable("The server is stopping.")
                    await self._ends.setdefault(model, asyncio.Event()).wait()
        except TimeoutError:
            reason = f"No worker of `{model}` has started in time."
            raise Unavailable(reason, RETRY_AFTER_S) from None
        finally:
            self._waiting.remove(model, sequence)

    def stop(self) -> None:
        """End all waits with an error."""
        self._stopping = True
        for model in list(self._ends):
            self._end(model)

    async def run(self) -> None:
        """Post wakes and end waits until cancelled."""
        while True:
            if not self._waiting.counts():
                self._any.clear()
                await self._any.wait()
            await next_tick(TICK_S)
            for model in list(self._ends):
                if not self.is_idle(model):
                    self._end(model)
            self._post()

    def _end(self, model: str) -> None:
        self._ends.pop(model).set()

    def _post(self) -> None:
        for model, count in self._waiting.counts().items():
            metrics.waking.labels(model).set(count)
        for wake in self._waiting.due(self._loop.time(), time.time()):
            self._bus.post(self._bus.subjects.wake(wake.model), wake)
