"""One seeded run: a mesh, clients, faults for a while, healing, and a check of the properties."""

import asyncio
import logging
import random
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvmesh.bus.messages import MessageDecoder, Parked, RouteNews
from kvmesh.bus.subjects import Subjects
from support.simulation import properties
from support.simulation.callers import Caller
from support.simulation.clock import simulated_clocks
from support.simulation.faults import Faults
from support.simulation.jetstream import JetStream, Stream
from support.simulation.loop import NODE, SimLoop
from support.simulation.network import SERVER, Network
from support.simulation.processes import (
    KINDS,
    Process,
    WorkerProcess,
    connect,
)

PROCESSES = {"router": 2, "indexer": 2, "worker": 3, "auditor": 1}
CALLERS = 2
CALL_S = 0.4
EVICTS = 0.2
START_S = 10.0
CHAOS_S = 20.0
HEAL_S = 45.0
BURST = 24
KV = Subjects("sim").kv_stream
ROUTE = Subjects("sim").router("m")
LOG_LINES = 300
# a router logs this for requests whose end it did not receive
GIVEN_UP = re.compile(r"gave up \d+ requests without events, such as (\S+)")
P = TypeVar("P", bound=Process)
_news: MessageDecoder[RouteNews] = MessageDecoder(RouteNews)


@dataclass(frozen=True)
class Result:
    """The result of one run; `broken` names the violated properties."""

    seed: int
    faults: list[str]
    digest: str
    broken: list[str]
    log: list[str]
    steps: int
    requests: int

    def __str__(self) -> str:
        violated = "\n".join(f"  {line}" for line in self.broken)
        return f"seed {self.seed} with {', '.join(self.faults) or 'no faults'}:\n{violated}"


def simulate(seed: int, only: frozenset[str] | None = None) -> Result:
    """Run one seed from start to end, with its own choice of faults or `only` these."""
    loop = SimLoop(seed)
    state = random.getstate()
    random.seed(seed)
    faults = Faults.of(loop.random) if only is None else Faults(only, loop.random)
    world = World(seed, loop, faults)
    try:
        with world.environment():
            loop.run_until_complete(world.run())
            result = world.result()
            loop.close()
    finally:
        random.setstate(state)
    return result


class World:
    """All objects of one run."""

    def __init__(self, seed: int, loop: SimLoop, faults: Faults) -> None:
        self.seed = seed
        self.loop = loop
        self.faults = faults
        self.random = loop.random
        self.skews: dict[str, float] = {}
        self.network = Network(loop, faults)
        self.network.taps.append(self._tap)
        self.server = JetStream(self.network)
        self.processes: list[Process] = []
        self.callers: list[Caller] = []
        self.broken: list[str] = []
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self._processes_started = 0
        self._reply_subjects: set[str] = set()
        self.answers: dict[str, set[bytes]] = {}
        self.compared = 0
        self._requests_before_healing: dict[str, int] | None = None  # None: faults may still occur

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Virtual clocks, and one log of all processes."""
        logger, recorder = logging.getLogger("kvmesh"), LogRecorder(self)
        before = logger.level, logger.propagate
        logger.addHandler(recorder)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        try:
            with simulated_clocks(self.loop, self.skews):
                yield
        finally:
            logger.removeHandler(recorder)
            logger.level, logger.propagate = before

    def log_line(self, text: str) -> None:
        """Add a line to the log of this run."""
        self.log.append(f"{self.loop.now:9.4f} {NODE.get():12} {text}")

    # --- the run

    async def run(self) -> None:
        """The whole run."""
        self.faults.healing = True
        for kind, count in PROCESSES.items():
            for number in range(count):
                self._start(kind, f"{kind}{number}")
        await self._wait_for_properties("start", START_S)
        await asyncio.gather(*(self._caller(f"caller{number}") for number in range(CALLERS)))
        self.faults.healing = False
        chaos = [asyncio.create_task(self._inject(name)) for name in sorted(self.faults.chosen)]
        chaos.append(asyncio.create_task(self._supervise()))
        calls = [self.loop.spawn(caller.name, caller.run(CALL_S)) for caller in self.callers]
        await asyncio.sleep(CHAOS_S)
        self._heal()
        await asyncio.wait(calls)
        await self._wait_for_properties("healed", HEAL_S)
        if not self.broken:
            self._requests_before_healing = {caller.name: caller.sent for caller in self.callers}
        await self._burst()
        await self._wait_for_properties("after a burst", HEAL_S)
        for task in chaos:
            task.cancel()
        self._check_end()

    async def _wait_for_properties(self, when: str, patience: float) -> None:
        """Wait until all properties hold; record the violated ones at the timeout."""
        ends = self.loop.now + patience
        while wrong := properties.violations(self):
            if self.loop.now > ends:
                self.broken += [f"{when}: {text}" for text in wrong]
                return
            await asyncio.sleep(0.25)

    def is_lost(self, request: str) -> bool:
        """True if the request was sent after the last fault, so that no router may give it up."""
        name, _, number = request.partition(".")[0].rpartition("-")
        return (
            self._requests_before_healing is not None
            and int(number) > self._requests_before_healing[name]
        )

    def _check_end(self) -> None:
        self.broken += self.loop.failures
        self.broken += properties.differing_replies(self.answers)

    def result(self) -> Result:
        requests = sum(caller.sent for caller in self.callers)
        faults, digest = sorted(self.faults.chosen), self.loop.digest
        return Result(
            self.seed, faults, digest, self.broken, list(self.log), self.loop.steps, requests
        )

    # --- processes

    def alive(self, kind: type[P]) -> list[P]:
        return [p for p in self.processes if isinstance(p, kind) and not p.ended]

    def _start(self, kind: str, name: str) -> None:
        self._processes_started += 1
        node = f"{name}-{self._processes_started}"
        if "skew" in self.faults.chosen:
            self.skews[node] = self.random.uniform(-3.0, 3.0)
        client, bus = connect(self.network, node)
        process = KINDS[kind](kind, name, node, client, bus)
        self.processes.append(process)
        self.loop.spawn(node, process.main())

    async def _supervise(self) -> None:
        """Restart ended processes a little later, as new instances."""
        while True:
            await asyncio.sleep(0.5)
            for process in [p for p in self.processes if p.ended]:
                self.processes.remove(process)
                process.client.terminate()
                await asyncio.sleep(self.random.uniform(0.2, 2.0))
                self._start(process.kind, process.name)

    def _caller(self, name: str) -> asyncio.Task[None]:
        _, bus = connect(self.network, name)
        caller = Caller(name, bus, self.random, self.faults, self._store_prompt)
        self.callers.append(caller)
        return self.loop.spawn(name, caller.start())

    def _store_prompt(self, instance: str, blocks: list[int]) -> None:
        """Store a computed prompt at a worker, which may evict a block for it."""
        worker = next((w for w in self.alive(WorkerProcess) if w.node == instance), None)
        if worker is not None and worker.ready:
            self.loop.call_soon(worker.store, blocks, context=worker.context)
            if self.random.random() < EVICTS:
                self.loop.call_soon(worker.evict, self.random.choice, context=worker.context)

    # --- faults

    async def _inject(self, name: str) -> None:
        action = getattr(self, f"_{name}", None)
        while action is not None and not self.faults.healing:
            await asyncio.sleep(self.faults.interval(name))
            if self.faults.on(name):
                self.log_line(f"fault: {name}")
                action()

    def _heal(self) -> None:
        self.log_line("healing")
        self.faults.healing = True
        self.loop.frozen.clear()

    def _reconnect(self) -> None:
        self.random.choice(self.network.clients).cut()

    def _consumer_gone(self) -> None:
        streams = [s for s in self.server.streams.values() if s.consumers]
        if streams:
            consumers = self.random.choice(streams).consumers
            del consumers[self.random.choice(list(consumers))]

    def _freeze(self) -> None:
        node = self.random.choice([SERVER, *(p.node for p in self.processes)])
        self.loop.frozen.add(node)
        self.loop.call_later(self.random.uniform(0.3, 6.0), self.loop.frozen.discard, node)

    def _kill(self) -> None:
        process = self.random.choice(self.processes)
        self.loop.kill(process.node)
        process.client.terminate()
        process.ended = True

    def _restart(self) -> None:
        self.server.restart()

    def _rewind(self) -> None:
        self.server.restart(forgotten=self.random.randint(1, 40))

    def _recreate(self) -> None:
        old = self.server.streams[KV]
        self.server.streams[KV] = Stream(old.config, self.loop.now)

    def _purge(self) -> None:
        self.server.purge_half(self.server.streams[KV])

    def _clear(self) -> None:
        workers = [w for w in self.alive(WorkerProcess) if w.ready]
        if workers:
            worker = self.random.choice(workers)
            self.loop.call_soon(worker.clear, context=worker.context)

    # --- the end

    async def _burst(self) -> None:
        """Send more requests at once than fit; all replicas place them in one order."""
        before = [(c.placed, len(c.refused)) for c in self.callers]
        tasks = [
            self.loop.spawn(caller.name, caller.request())
            for caller in self.callers
            for _ in range(BURST)
        ]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            self.broken += properties.order_differences(self) + properties.accounting_errors(self)
        for caller, (placed, refused) in zip(self.callers, before, strict=True):
            if (count := caller.placed - placed) != BURST:
                reasons = [refusal.reason for refusal in caller.refused[refused:]]
                self.broken.append(f"{caller.name}: {count} of {BURST} were placed: {reasons[:3]}")

    def _tap(self, subject: str, data: bytes, reply: str) -> None:
        """Record the queries and replies that reach the server."""
        if subject.startswith(ROUTE):
            self._reply_subjects.add(reply)
        elif subject in self._reply_subjects and not isinstance(_news.decode(data), Parked):
            self.answers.setdefault(subject, set()).add(data)


class LogRecorder(logging.Handler):
    """Records the processes' log; an error counts as a violated property.

    A request that a router gives up counts as well, if it was sent after the mesh had healed: its
    sender frees it. The free message of an earlier request may be lost.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.log_line(f"{record.levelname} {record.getMessage()}")
        if record.levelno >= logging.ERROR:
            cause = record.exc_info[1] if record.exc_info else ""
            self._world.broken.append(f"{NODE.get()}: {record.getMessage()} {cause!r}")
        elif (found := GIVEN_UP.match(record.getMessage())) and self._world.is_lost(found[1]):
            self._world.broken.append(f"{NODE.get()}: {record.getMessage()}")
