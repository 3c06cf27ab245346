"""Clients of a simulated mesh: a frontend's route client, without HTTP."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.messages import (
    Hints,
    Placement,
    Refused,
    Routed,
    RouteRequest,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqProgress,
)
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.runtime.service import stream_limits
from support.events import MODEL, SALT, prompt
from support.simulation.faults import Faults
from support.simulation.processes import BLOCK, SETTINGS

Options = tuple[Hints, Placement]
DEADLINE_S = 20.0
VANISHES = 0.15


def prompts() -> list[list[int]]:
    """Families of prompts with common prefixes."""
    return [
        [
            family * 1000 + (block if block < shared else 100 * length + block)
            for block in range(length)
        ]
        for family in range(4)
        for length, shared in ((3, 3), (6, 3), (9, 5), (12, 9))
    ]


class Caller:
    """One client process; `store_prompt` makes a worker compute a prompt."""

    def __init__(
        self,
        name: str,
        bus: Bus,
        random: Random,
        faults: Faults,
        store_prompt: Callable[[str, list[int]], None],
    ) -> None:
        self.name = name
        self._random = random
        self._faults = faults
        self._store_prompt = store_prompt
        self._tracker = SequenceEventPublisher(bus, name)
        self._route_client = RouteClient(bus, self._tracker)
        limits = stream_limits(SETTINGS.streams)
        self._directory = Directory(bus, limits, self._route_client.joined, self._route_client.left)
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent = 0
        self.placed = 0
        self.refused: list[Refused] = []
        self.open_requests = 0

    async def start(self) -> None:
        """Load the cards of the mesh."""
        self._spawn(self._tracker.run())
        await self._route_client.open()
        self._spawn(self._route_client.run())
        await self._directory.open()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def run(self, pause: float) -> None:
        """Start one request after another until the mesh heals, and wait until all have ended."""
        requests = []
        while not self._faults.healing:
            requests.append(self._spawn(self.request()))
            await asyncio.sleep(self._random.expovariate(1 / pause))
        await asyncio.gather(*requests)

    async def request(self) -> None:
        """One request from its route query to its last token."""
        self.sent += 1
        self.open_requests += 1
        number, blocks, options = self.sent, self._prompt(), self._options()
        started = asyncio.get_running_loop().time()
        attempts = 0

        def compose(anew: bool, arrived: float | None) -> RouteRequest:
            nonlocal attempts
            attempts += anew
            left = started + DEADLINE_S - asyncio.get_running_loop().time()
            attempt = f"{self.name}-{number}.{attempts}"
            return self._message(attempt, blocks, left, arrived, options)

        try:
            answer = await self._route_client.request(MODEL, compose, DEADLINE_S)
            request = f"{self.name}-{number}.{attempts}"
            if isinstance(answer, Routed):
                self.placed += 1
                await self._follow(request, answer, blocks)
            else:
                self.refused.append(answer)
                self._publish(SeqFree(request))
        finally:
            self.open_requests -= 1

    def _prompt(self) -> list[int]:
        """A prompt that workers may hold, or a new one that makes others wait."""
        if self._random.random() < 0.5:
            return self._random.choice(prompts())
        first = self._random.randrange(1 << 20, 1 << 40)
        return list(range(first, first + 8))

    def _options(self) -> Options:
        """The fields that are equal in every attempt of a request."""
        hints = Hints(
            priority=self._random.choice([0, 0, 0, 3]),
            strict_priority=self._random.choice([0, 0, 0, 1]),
            tenant=self._random.choice(["red", "blue"]),
        )
        excludes = self._random.random() < 0.15
        return hints, Placement(exclude=["absent"]) if excludes else Placement()

    def _message(
        self, request: str, blocks: list[int], left: float, arrived: float | None, options: Options
    ) -> RouteRequest:
        hints, placement = options
        return RouteRequest(
            request=request,
            model=MODEL,
            sequence_hashes=prompt(blocks),
            tokens=len(blocks) * BLOCK,
            max_tokens=16,
            deadline_s=max(left, 0.001),
            hints=hints,
            placement=placement,
            salt=SALT,
            arrived=arrived,
        )

    async def _follow(self, request: str, routed: Routed, blocks: list[int]) -> None:
        await asyncio.sleep(self._random.uniform(0.02, 0.3))
        self._store_prompt(routed.instance, blocks)
        self._publish(SeqPrefilled(request))
        await asyncio.sleep(self._random.uniform(0.02, 0.5))
        self._publish(SeqProgress(request, 8))
        if self._faults.on("vanish") and self._random.random() < VANISHES:
            return
        self._publish(SeqFree(request))

    def _publish(self, event: SeqEvent) -> None:
        self._tracker.event(MODEL, event)
