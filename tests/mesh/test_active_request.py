"""One active request by itself, on a real bus with a scripted router and worker."""

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from time import sleep, time
from typing import Any

import msgspec
import pytest
from support.frontend import MODEL, ScriptedWorker, scripted_router, scripted_worker
from support.stamp import STAMP
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.discovery.ping import answer_pings
from kvmesh.bus.messages import Chunk, Instance, ModelCard, Role, StepOutput
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.base import ApiCall
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.dispatch.dispatcher import Dispatcher
from kvmesh.frontend.dispatch.liveness import LivenessMonitor
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.dispatch.token_inbox import TokenInbox, step_decoder
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.dispatch.work_client import WorkClient
from kvmesh.frontend.generation.active_request import ActiveRequest, RequestRunner
from kvmesh.frontend.models import Dialect, ModelRegistry, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess.preprocessor import Preprocessor
from kvmesh.frontend.wake.waker import Waker
from kvmesh.settings.schema import FrontendSettings, RouterSettings

BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "n": 2,
}
# Fields of a stream for which the renderer asks the request about the answer so far.
SO_FAR = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "nvext": {"extra_fields": ["worker_id"]},
}


def served() -> ServedModel:
    card = ModelCard(name=MODEL, files="", block_size=16, context=4096)
    files = {file.name: file.read_bytes() for file in model_dir().iterdir() if file.is_file()}
    return ServedModel(card, Dialect(card, files), created=int(time()))


def spawn(coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    return asyncio.create_task(coroutine, name=name)


class Frames:
    """A sink that is always writable and stores the frames."""

    writable = True

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def write(self, frame: bytes) -> None:
        self.frames.append(frame)


class Frontend:
    """The parts of a frontend beneath HTTP, without their periodic tasks."""

    def __init__(self, bus: Bus, limits: StreamLimits) -> None:
        self.bus = bus
        self.inbox = TokenInbox(0.0)
        self.directory = Directory(bus, limits)
        self.workers = WorkClient(bus, self.inbox, self.directory)
        self.events = SequenceEventPublisher(bus, "f-1")
        self.routes = RouteClient(bus, self.events)
        self.monitor = self.monitored(60.0)
        settings = FrontendSettings()
        dispatcher = Dispatcher(
            "f-1",
            self.workers,
            self.monitor,
            self.routes,
            self.events,
            Waker(bus, "f-1", ModelRegistry(bus, spawn, "f-1"), 1),
            settings,
            RouterSettings(),
        )
        self.runner = RequestRunner(dispatcher, self.events)

    def monitored(self, stall_timeout: float) -> LivenessMonitor:
        return LivenessMonitor(self.bus, self.workers, self.events, stall_timeout)

    async def open(self) -> None:
        def receive(output: StepOutput) -> None:
            self.inbox.receive(output)

        await self.bus.subscribe(self.bus.subjects.out("f-1"), step_decoder, receive)
        await self.routes.open()

    async def request(self, sink: Frames, **fields: Any) -> ActiveRequest:
        call: ApiCall = Chat().parse(msgspec.json.encode(BODY | fields), {}, STAMP)
        preprocessor = Preprocessor(1 << 20, TenantNamespaces())
        prepared = await preprocessor.prepare(call.request, served(), None)
        now = asyncio.get_running_loop().time()
        active = self.runner.run(prepared, call.renderer, now, sink)
        call.renderer.begin(active.so_far)
        return active


async def answer(worker: ScriptedWorker, sink: Frames) -> None:
    """Send tokens of both choices; end them once the client has frames of each."""
    works = [await worker.work(number) for number in range(2)]
    for work in works:
        await worker.send(work, Chunk(work.request, 0, [300, 301]))
    await eventually(lambda: len(sink.frames) == 2)
    for work in works:
        await worker.send(work, Chunk(work.request, 2, [302], finish="stop"))


def parts(active: ActiveRequest) -> "list[weakref.ref[Any]]":
    return [weakref.ref(part) for part in (active, *active._choices, *active._pipelines)]


@pytest.mark.parametrize("fields", [{}, SO_FAR], ids=["plain", "so far"])
async def test_a_finished_request_leaves_no_garbage_cycle(
    bus: Bus, limits: StreamLimits, fields: dict[str, Any]
) -> None:
    frontend = Frontend(bus, limits)
    await frontend.open()
    async with scripted_router(bus, limits) as router, scripted_worker(bus, limits, "w") as worker:
        router.order = [worker.instance]
        sink = Frames()
        gc.collect()
        gc.disable()
        try:
            active = await frontend.request(sink, **fields)
            gone = parts(active)
            answering = asyncio.create_task(answer(worker, sink))
            async with active:
                await active.accepted(10.0)
                last = await active.finished()
                done = active.summary().usage
            await answering
            del active
            await asyncio.sleep(0)  # the loop drops its last callback
            assert [part() for part in gone] == [None] * len(gone)
        finally:
            gc.enable()
        assert last.count(b"data: ") <= 2  # the ends of the choices leave with that of the stream
        assert done.output == 6
        assert not frontend.inbox


async def test_a_lease_is_deleted_once_its_process_stays_away(
    bus: Bus, limits: StreamLimits
) -> None:
    card = Instance(instance="w-1", role=Role.WORKER, name="w", version="0", started=0.0)
    lease, frontend = Lease(bus, card, limits), Frontend(bus, limits)
    directory, workers = frontend.directory, frontend.workers
    back, gone = asyncio.Event(), asyncio.Event()
    workers.back, workers.gone = lambda _: back.set(), lambda _: gone.set()
    await lease.open()
    await directory.open()
    workers.suspect("w-1")
    assert workers.silent == ["w-1"]
    listening = await answer_pings(bus, "w-1")
    await eventually(back.is_set)
    assert directory.instances
    await listening.unsubscribe()
    workers.suspect("w-1")
    await eventually(lambda: not directory.instances)
    assert gone.is_set()
    await lease.close()
    await directory.close()


async def test_a_pause_of_this_process_is_no_silence_of_the_engine(
    bus: Bus, limits: StreamLimits
) -> None:
    monitor = Frontend(bus, limits).monitored(0.9)
    now = asyncio.get_running_loop().time()
    stream = TokenStream("s", now)
    monitor.watch("m", stream)
    stream.dispatched("w-1", now)
    running = asyncio.create_task(monitor.run())
    await asyncio.sleep(0)
    for _ in range(2):
        sleep(1.5)  # noqa: ASYNC251 (nothing runs here meanwhile, as while it is stopped)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not stream.ended.is_set()
    await eventually(stream.ended.is_set)
    assert stream.error is not None
    running.cancel()
    await asyncio.wait([running])
