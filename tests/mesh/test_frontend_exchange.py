"""One exchange by itself, on a real bus."""

import asyncio
import gc
import weakref
from time import sleep, time

from support.stamp import STAMP
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery import Directory, Lease
from kvmesh.bus.messages import Instance, ModelCard, Role
from kvmesh.bus.streams import StreamLimits
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.dispatch.dispatcher import Dispatcher, SequenceTask
from kvmesh.frontend.dispatch.liveness import LivenessMonitor
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.dispatch.token_inbox import TokenInbox
from kvmesh.frontend.dispatch.token_stream import Nobody, TokenStream
from kvmesh.frontend.dispatch.work_client import WorkClient
from kvmesh.frontend.generation.active_request import ActiveRequest, RequestRuntime
from kvmesh.frontend.models import Dialect, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess.preprocessor import Preprocessor
from kvmesh.settings.schema import FrontendSettings

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true}'


def served() -> ServedModel:
    card = ModelCard(name="m", files="", block_size=16, context=4096)
    files = {file.name: file.read_bytes() for file in model_dir().iterdir() if file.is_file()}
    return ServedModel(card, Dialect(card, files), created=int(time()))


def engine(bus: Bus, limits: StreamLimits) -> RequestRuntime:
    def ignore(_: Instance | TokenStream) -> None:
        return

    inbox, tracker = TokenInbox(0.0, ignore), SequenceEventPublisher(bus, "f-1")
    directory = Directory(bus, limits, ignore, ignore)
    asking = RouteClient(bus, tracker)
    dispatcher = Dispatcher(bus, "f-1", inbox, tracker, directory, asking, FrontendSettings())
    monitor = LivenessMonitor(bus, dispatcher.offers, tracker, 60.0, lambda: 0)
    return RequestRuntime(dispatcher, inbox, monitor, tracker, 60.0)


async def test_what_is_over_is_gone_without_a_garbage_collection(
    bus: Bus, limits: StreamLimits
) -> None:
    call = Chat().parse(BODY, {}, STAMP)
    prepared = await Preprocessor(1 << 20, TenantNamespaces()).prepare(call.request, served(), None)
    now = asyncio.get_running_loop().time()
    exchange = ActiveRequest(engine(bus, limits), prepared, call.renderer, now)
    gone = weakref.ref(exchange)
    gc.disable()
    try:
        async with exchange:
            assert exchange.jobs
        del exchange
        assert gone() is None
    finally:
        gc.enable()


async def test_nobody_is_taken_for_gone_right_after_the_own_connection_was_made(
    bus: Bus, limits: StreamLimits
) -> None:
    card = Instance(instance="w-1", role=Role.WORKER, name="w", version="0", started=0.0)
    lease, directory = Lease(bus, card, limits), Directory(bus, limits)
    await lease.open()
    await directory.open()
    offers = WorkClient(bus, TokenInbox(0.0, lambda _: None), directory)
    bus.connected_at = asyncio.get_running_loop().time()
    await offers.bury("w-1")
    bucket = await bus.js.key_value(bus.subjects.instances_bucket)
    assert await bucket.keys()
    bus.connected_at -= 60.0
    await offers.bury("w-1")
    await eventually(lambda: not directory.instances)
    await lease.close()
    await directory.close()


async def test_a_pause_of_ones_own_is_no_silence_of_the_engine(
    bus: Bus, limits: StreamLimits
) -> None:
    call = Chat().parse(BODY, {}, STAMP)
    prepared = await Preprocessor(1 << 20, TenantNamespaces()).prepare(call.request, served(), None)
    parts = engine(bus, limits)
    monitor = LivenessMonitor(bus, parts.dispatcher.offers, parts.tracker, 0.9, lambda: 0)
    now = asyncio.get_running_loop().time()
    sequence = TokenStream("s", Nobody(), now)
    monitor.add(SequenceTask(prepared, prepared.prompts[0], sequence, now + 60))
    sequence.place("w-1", now)
    running = asyncio.create_task(monitor.run())
    await asyncio.sleep(0)
    for _ in range(2):
        sleep(1.5)  # noqa: ASYNC251 (nothing runs here meanwhile, as while it is stopped)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not sequence.ended.is_set()
    await eventually(sequence.ended.is_set)
    assert sequence.error is not None
    running.cancel()
    await asyncio.wait([running])
