"""A real frontend process with scripted peers: tests control routers and workers."""

import asyncio
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from tokenizers import Tokenizer

from kvmesh.bus.client import Bus, Reply
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.messages import (
    Cancel,
    Capacity,
    Chunk,
    Control,
    ControlReply,
    Instance,
    MessageDecoder,
    ModelCard,
    NotCleared,
    Ping,
    Refused,
    Resend,
    Role,
    Routed,
    RouteReply,
    RouteRequest,
    StepOutput,
    Work,
    WorkReply,
)
from kvmesh.bus.storage.model_files import publish_model
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.demo import model_dir
from support import streams
from support.mesh import Mesh, stream_env
from support.wait import PATIENCE_S

MODEL = "kvmesh-demo"
CONTEXT = 2048
LIMITS = StreamLimits(kv_bytes=256 << 20, route_bytes=64 << 20, seq_bytes=64 << 20, lease_s=10.0)
TOKENIZER = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
ROUTES = MessageDecoder(RouteRequest)
WORKS = MessageDecoder(Work)
CONTROLS: MessageDecoder[Control] = MessageDecoder(Control)
PINGS = MessageDecoder(Ping)


def ids(text: str) -> list[int]:
    """The tokens of a text."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


class ScriptedRouter:
    """Routes to the first of `order` that is not excluded; `refusal` overrides it.

    It reports `overlap` blocks per tier. With `queues_all`, every request waits in the queue.
    """

    def __init__(self) -> None:
        self.order: list[str] = []
        self.refusal: Refused | None = None
        self.queues_all = False
        self.overlap = [0, 0, 0, 0]
        self.requests: list[RouteRequest] = []

    async def answer(self, request: RouteRequest, reply: Reply) -> None:
        self.requests.append(request)
        if not self.queues_all:
            reply(self.choose(request))

    def choose(self, request: RouteRequest) -> RouteReply:
        if self.refusal is not None:
            return self.refusal
        for instance in self.order:
            if instance not in request.placement.exclude:
                return Routed(instance=instance, rank=0, overlap=self.overlap)
        return Refused(code="no_workers", reason="all are excluded", retry_after_s=2.0)


def attempt(work: Work) -> str:
    """The name that routers have for what a worker has as `work`."""
    return work.request.removesuffix(work.ref)


class ScriptedWorker:
    """Replies to work with `status` and sends exactly the chunks of the test.

    With `stores_prompts` it reports stored prompts, but replies "incomplete" to work with a `base`.
    While `frozen` it does not reply; with `hangs` it freezes at the first work.
    """

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus = bus
        self.instance = f"{name}-1"
        self.status = "accepted"
        self.control_ok = True
        self.not_cleared: list[NotCleared] = []
        self.stores_prompts = False
        self.frozen = self.hangs = False
        self.works: list[Work] = []
        self.cancelled: list[str] = []
        self.resends: list[Resend] = []
        self.controls: list[Control] = []
        self.blocks = 0
        self._arrived = asyncio.Condition()
        self._subscriptions: list[Any] = []

    async def listen(self) -> None:
        subjects = self.bus.subjects
        self._subscriptions = [
            await self.bus.serve(subjects.work(self.instance), WORKS, self._work),
            await self.bus.serve(subjects.ctl(self.instance), CONTROLS, self._control),
            await self.bus.serve(subjects.ping(self.instance), PINGS, self._ping),
        ]

    async def unsubscribe(self) -> None:
        """Unsubscribe, as a killed process does."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    async def _work(self, work: Work, reply: Reply) -> None:
        self.frozen = self.frozen or self.hangs
        status = "incomplete" if work.base else self.status
        if not self.frozen:
            reply(WorkReply(status=status, stored=self.stores_prompts))
        async with self._arrived:
            if all(
                known.request != work.request or work.base != known.base for known in self.works
            ):
                self.works.append(work)  # an offer without a reply is repeated
            self._arrived.notify_all()

    async def _control(self, control: Control, reply: Reply) -> None:
        if self.frozen:
            return
        if isinstance(control, Cancel):
            self.cancelled.append(control.request)
        if isinstance(control, Resend):
            self.resends.append(control)
        self.controls.append(control)
        ok, left = self.control_ok, self.not_cleared
        reply(ControlReply(ok, "" if ok else "why", self.blocks, not_cleared=left))

    async def _ping(self, _: Ping, reply: Reply) -> None:
        if not self.frozen:
            reply(ControlReply(ok=True))

    async def work(self, number: int = 0) -> Work:
        """The `number`-th work that arrives here."""
        async with asyncio.timeout(PATIENCE_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.works) > number)
            return self.works[number]

    async def send(self, work: Work, *chunks: Chunk) -> None:
        subject = self.bus.subjects.out(work.frontend)
        self.bus.post(subject, StepOutput(self.instance, list(chunks)))


@asynccontextmanager
async def scripted_worker(
    bus: Bus,
    limits: StreamLimits,
    name: str,
    tier_blocks: Sequence[int] = (),
    started: float = 0.0,
    served: str = MODEL,
    **card: Any,
) -> AsyncIterator[ScriptedWorker]:
    """A worker of the demo model, named `served`; other keywords change its model card."""
    files = await publish_model(bus, model_dir())
    fields: dict[str, Any] = {"name": served, "context": CONTEXT, "block_size": 16, "files": files}
    model = ModelCard(**{**fields, "structural_tags": True, **card})
    worker = ScriptedWorker(bus, name)
    instance = Instance(
        instance=worker.instance,
        role=Role.WORKER,
        name=name,
        version="0",
        started=started,
        model=model,
        capacity=Capacity(
            blocks=1000,
            max_sequences=8,
            max_batched_tokens=2048,
            tier_blocks=list(tier_blocks),
        ),
    )
    await worker.listen()
    lease = Lease(bus, instance, limits)
    await lease.open()
    yield worker
    await lease.close()


@asynccontextmanager
async def scripted_router(
    bus: Bus, limits: StreamLimits, router: ScriptedRouter | None = None
) -> AsyncIterator[ScriptedRouter]:
    """A router of the demo model on the mesh; `router` replaces the plain one."""
    router = router or ScriptedRouter()
    await bus.serve(bus.subjects.router(MODEL), ROUTES, router.answer, queue="router")
    card = Instance(instance="router-1", role=Role.ROUTER, name="router", version="0", started=0.0)
    lease = Lease(bus, card, limits)
    await lease.open()
    yield router
    await lease.close()


@asynccontextmanager
async def frontend_mesh(
    url: str, folder: Path, settings: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[Mesh, Bus]]:
    """A mesh with one frontend that starts, and a connection to its bus."""
    mesh = Mesh(url, folder, stream_env(LIMITS) if settings is None else dict(settings))
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, LIMITS)
    mesh.start("frontend", "frontend-0")
    yield mesh, bus
    mesh.stop()
    await bus.close()


def client_session() -> aiohttp.ClientSession:
    """A session with one connection per request: the frontend may close idle connections."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


class Client:
    """A plain HTTP client of one frontend."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        """(status, decoded body) of a POST; `body` is sent unchanged if it is bytes."""
        data = io.BytesIO(body if isinstance(body, bytes) else msgspec.json.encode(body))
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: object, **headers: str) -> aiohttp.ClientResponse:
        data = msgspec.json.encode(body)
        return await self.session.post(self.url + path, data=data, headers=headers)


async def events(response: aiohttp.ClientResponse, begin: bytes = b"") -> list[Any]:
    """All events of a stream, which must build an answer or fail; `[DONE]` is a string.

    `begin` is what has been read before.
    """
    found = streams.parse((begin + await response.read()).decode())
    streams.check(response.url.path, found)
    return found
