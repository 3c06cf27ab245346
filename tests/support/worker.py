"""A worker in the test's process, its peer, and a reader of its events."""

from array import array
from dataclasses import dataclass, field

import msgspec

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import (
    Chunk,
    Cleared,
    ControlReply,
    Dump,
    KvBatch,
    KvEvent,
    Load,
    MessageDecoder,
    Removed,
    Sampling,
    StepOutput,
    Work,
    WorkReply,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.demo import model_dir
from kvmesh.settings import Settings
from kvmesh.settings.schema import MockSettings, WorkerSettings
from kvmesh.worker.engine import EngineContext, EngineError, create_engine
from kvmesh.worker.node import WorkerNode
from kvmesh.worker.start.report import StartReport
from kvmesh.worker.start.timeline import StartTimeline
from support.wait import PATIENCE_S, eventually

CONTROL_REPLY = MessageDecoder(ControlReply)

FAST = MockSettings(blocks=256, speedup=50.0)
SLOW = MockSettings(blocks=256, speedup=1.0)
SALT = 11


def prompt(length: int, first: int = 0) -> bytes:
    return array("I", [(first + 7 * i) % 5000 for i in range(length)]).tobytes()


def work(name: str, tokens: bytes, max_tokens: int = 20, **fields: object) -> Work:
    base = Work(
        request=name,
        frontend="front",
        tokens=tokens,
        sampling=Sampling(max_tokens=max_tokens),
        salt=SALT,
    )
    return msgspec.structs.replace(base, **fields)


@dataclass
class StreamedContents:
    """Contents of each rank according to the KV stream; fails on gaps unless `tolerant`."""

    held: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    next_id: dict[tuple[str, int], int] = field(default_factory=dict)
    dumps: int = 0
    gaps: int = 0
    tolerant: bool = False

    def receive(self, message: StreamMessage) -> None:
        batch = msgspec.msgpack.decode(message.data, type=KvBatch)
        key = (batch.instance, batch.rank)
        expected = self.next_id.setdefault(key, 0)
        if batch.first + len(batch.events) == expected:
            return  # a duplicate, resent after a lost acknowledgement
        if batch.first != expected:
            assert self.tolerant, f"a gap before {batch.first}: {expected}"
            self.gaps += 1
        self.next_id[key] = batch.first + len(batch.events)
        for event in batch.events:
            self._apply(self.held.setdefault(key, set()), event)

    def _apply(self, held: set[int], event: KvEvent) -> None:
        if isinstance(event, Cleared):
            self.dumps += 1
            held.clear()
        elif isinstance(event, Removed):
            held.difference_update(array("Q", event.engine))
        else:
            assert self.tolerant or event.parent is None or event.parent in held
            assert (event.parent is None) == (event.salt == SALT)
            held.update(array("Q", event.engine))


class ScriptedFrontend:
    """The frontend's side of a worker's messages, and a reader of the KV stream."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.chunks: dict[str, list[Chunk]] = {}
        self.loads: list[Load] = []
        self.contents = StreamedContents()
        self.reader = StreamReader(
            bus, bus.subjects.kv_stream, bus.subjects.kv_all, self.contents.receive, Start()
        )

    async def open(self) -> None:
        async def on_output(output: StepOutput) -> None:
            for chunk in output.chunks:
                self.chunks.setdefault(chunk.request, []).append(chunk)

        async def on_load(load: Load) -> None:
            self.loads.append(load)

        subjects = self.bus.subjects
        await self.bus.subscribe(subjects.out("front"), MessageDecoder(StepOutput), on_output)
        await self.bus.subscribe(subjects.load_all, MessageDecoder(Load), on_load)
        await self.reader.open()

    async def dispatch(self, instance: str, item: Work, timeout: float = PATIENCE_S) -> WorkReply:
        return await self.bus.request(
            self.bus.subjects.work(instance), item, MessageDecoder(WorkReply), timeout
        )

    async def dump(self, instance: str, rank: int) -> ControlReply:
        subject = self.bus.subjects.dump(instance)
        return await self.bus.request(subject, Dump(rank), CONTROL_REPLY, PATIENCE_S)

    async def control(self, instance: str, command: object) -> ControlReply:
        return await self.bus.request(
            self.bus.subjects.ctl(instance),
            command,
            CONTROL_REPLY,
            PATIENCE_S,
        )

    def finish(self, name: str) -> str | None:
        return next((c.finish for c in self.chunks.get(name, []) if c.finish), None)

    async def done(self, name: str) -> list[int]:
        await eventually(lambda: self.finish(name), what=f"{name} ends")
        return self.tokens(name)

    def tokens(self, name: str) -> list[int]:
        found: list[int] = []
        for chunk in self.chunks[name]:
            assert chunk.offset == self.chunks[name][0].offset + len(found)
            found += chunk.tokens
        return found


@dataclass
class RunningWorker:
    """A worker in this process with its own connection."""

    bus: Bus
    node: WorkerNode
    ends: list[EngineError | None]

    @property
    def instance(self) -> str:
        return self.node.instance

    async def stop(self) -> None:
        await self.node.close()
        await self.bus.close()


class Workers:
    """Starts workers and stops them after the test."""

    def __init__(self, options: BusOptions, limits: StreamLimits) -> None:
        self._options = options
        self._limits = limits
        self.started: list[RunningWorker] = []

    async def start(
        self, mock: MockSettings, worker: WorkerSettings | None = None, instance: str = "w-1"
    ) -> RunningWorker:
        settings = Settings(mock=mock, worker=worker or WorkerSettings())
        bus = await Bus.connect(self._options, "worker")
        ends: list[EngineError | None] = []
        timeline = StartTimeline()
        engine = create_engine(EngineContext(settings, model_dir(), timeline=timeline))
        node = WorkerNode(
            bus,
            engine,
            settings,
            model_dir(),
            "w",
            instance,
            self._limits,
            ends.append,
            timeline=timeline,
        )
        started = RunningWorker(bus, node, ends)
        self.started.append(started)
        with StartReport(bus, instance, model_dir().name, "mock", timeline):
            await node.start()
        return started
