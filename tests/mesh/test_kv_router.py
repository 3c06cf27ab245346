"""KvRouter in the caller's own process, against real workers."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.routers import running_workers
from support.wait import eventually

import kvmesh
from kvmesh.bus.client import Bus, BusOptions, Reply
from kvmesh.bus.messages import (
    Chunk,
    Hints,
    Load,
    MessageDecoder,
    Placement,
    Retain,
    Sampling,
    StepOutput,
    Work,
    WorkReply,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.router import KvRouter
from kvmesh.router.errors import InvalidRouteRequest, NoWorkers, RouteError, RouterConfigError
from kvmesh.router.worker_client import GenerationError
from kvmesh.settings.schema import RouterSettings

MODEL = "kvmesh-demo"
PROMPT = [5 + n % 90 for n in range(500)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    mesh = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), {"KVMESH_MOCK_SPEEDUP": "20"})
    mesh.start("indexer", "indexer-0")
    for name in ("worker-0", "worker-1"):
        mesh.start("worker", name)
    yield mesh
    mesh.stop()


async def both(router: KvRouter) -> bool:
    """True if both workers are known."""
    return len(await router.get_potential_loads(PROMPT)) == 2


async def test_a_prompt_is_placed_counted_and_freed(mesh: Mesh) -> None:
    async with KvRouter.connect(MODEL, mesh.options, timeout=30) as router:
        await eventually(lambda: both(router))
        prompt = [9, *PROMPT[1:]]
        first = await router.best_worker(prompt, request_id="one")
        assert first.overlap_blocks == 0
        carried = {p["worker_id"]: p for p in await router.get_potential_loads(prompt)}
        assert carried[first.worker_id]["active_requests"] == 1
        assert carried[first.worker_id]["potential_prefill_tokens"] == 500 + 500 - 496, (
            "31 blocks are predicted"
        )
        await router.mark_prefill_complete("one")
        again = await router.best_worker(prompt, update_indexer=False)
        assert again == (first.worker_id, 0, 31)
        elsewhere = await router.best_worker(
            prompt, update_indexer=False, placement=Placement(exclude=[first.worker_id])
        )
        assert elsewhere.worker_id != first.worker_id
        await router.free("one")
        assert {p["active_requests"] for p in await router.get_potential_loads(PROMPT)} == {0}
        with pytest.raises(InvalidRouteRequest):
            await router.best_worker(PROMPT, router_config_override={"nonsense": 1.0})
        with pytest.raises(ValueError, match="token id"):
            await router.best_worker([-1])
        with pytest.raises(RouteError, match="nobody"):
            await router.best_worker(
                PROMPT, request_id="two", placement=Placement(instance="nobody")
            )


async def test_tokens_are_generated_and_the_cache_is_known(mesh: Mesh) -> None:
    async with KvRouter.connect(MODEL, mesh.options, timeout=30) as router:
        prompt = [7, *PROMPT]
        sampling = Sampling(max_tokens=40, ignore_eos=True)
        tokens = [
            t
            async for part in router.generate(prompt, sampling=sampling)
            for t in part["token_ids"]
        ]
        assert len(tokens) == 40
        held = await router.best_worker(prompt, update_indexer=False)
        assert held.overlap_blocks == 31
        assert {p["active_requests"] for p in await router.get_potential_loads(prompt)} == {0}
        with pytest.raises(GenerationError):
            async for _ in router.generate([7] * 400_000, sampling=Sampling(max_tokens=1)):
                pass


async def test_a_custom_router_chooses_the_worker_of_an_answer(mesh: Mesh) -> None:
    """The lines of a program that was written for Dynamo's KvRouter."""
    config = {"overlap_score_weight": 2.0, "router_temperature": 0.0}
    async with kvmesh.KvRouter.connect(MODEL, mesh.options, timeout=30) as router:
        await eventually(lambda: both(router))
        loads = await router.get_potential_loads(PROMPT)
        chosen = min(loads, key=lambda load: load["potential_prefill_tokens"])["worker_id"]
        worker_id, dp_rank, overlap = await router.best_worker(
            PROMPT, request_id="req-123", update_indexer=True, router_config_override=config
        )
        assert (dp_rank, overlap) == (0, 0)
        assert worker_id in {load["worker_id"] for load in loads}
        await router.free("req-123")
        for worker in (chosen, "worker-1"):  # by instance, by name
            tokens = []
            async for part in router.generate(PROMPT, model=MODEL, worker_id=worker):
                tokens += part["token_ids"]
            assert tokens
            assert part["finish_reason"] in ("stop", "length")
        with pytest.raises(InvalidRouteRequest, match=MODEL):
            await anext(router.generate(PROMPT, model="another"))


async def test_an_answer_moves_off_a_killed_worker(mesh: Mesh) -> None:
    sampling = Sampling(max_tokens=300, ignore_eos=True, temperature=0.0)
    prompt = [11, *PROMPT]
    async with KvRouter.connect(MODEL, mesh.options, timeout=30) as router:
        await eventually(lambda: both(router))
        expected = [
            token
            async for part in router.generate(prompt, worker_id="worker-1", sampling=sampling)
            for token in part["token_ids"]
        ]
        tokens: list[int] = []
        async for part in router.generate(
            prompt, worker_id="worker-0", sampling=sampling, timeout=3
        ):
            if not tokens:
                mesh.kill("worker-0")
            tokens += part["token_ids"]
        assert tokens == expected
        assert part["finish_reason"] == "length"
        mesh.restart("worker-0")


async def test_work_keeps_the_terms_of_its_request(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    """Two stand-in workers: one refuses, the other receives what the caller stated."""
    received: list[Work] = []

    async with running_workers(bus, limits, "a", "b"), KvRouter.connect("m", options) as router:

        async def serve(work: Work, reply: Reply) -> None:
            received.append(work)
            reply(WorkReply(status="busy" if len(received) == 1 else "invalid", reason="no"))

        for instance in "ab":
            await bus.serve(bus.subjects.work(instance), MessageDecoder(Work), serve)
        answer = router.generate(
            PROMPT,
            sampling=Sampling(max_tokens=5),
            hints=Hints(priority=7, session="s", parent_session="p", ephemeral=True),
            retention=[Retain(0, 100, 90)],
            decode_retention=Retain(0, priority=1),
            adapter=None,
            tenant="t",
        )
        with pytest.raises(GenerationError) as refused:
            await anext(answer)
        assert refused.value.invalid
        first, second = received
        assert first.request != second.request
        for work in received:
            assert (work.priority, work.session, work.parent_session) == (7, "s", "p")
            assert (work.tenant, work.ephemeral) == ("t", True)
            assert work.retention == [Retain(0, 100, 90)]
            assert work.decode == Retain(0, priority=1)


async def test_only_the_asked_worker_writes_an_answer_and_no_more_than_asked(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    async with running_workers(bus, limits, "a", "b"), KvRouter.connect("m", options) as router:

        async def serve(work: Work, reply: Reply) -> None:
            reply(WorkReply(status="accepted"))
            out = bus.subjects.out(work.frontend)
            bus.post(out, StepOutput("b", [Chunk(work.request, 0, [666])]))
            bus.post(out, StepOutput("a", [Chunk(work.request, 0, [1, 2, 3, 4])]))

        await bus.serve(bus.subjects.work("a"), MessageDecoder(Work), serve)
        sampling = Sampling(max_tokens=3)
        answer = [part async for part in router.generate(PROMPT, worker_id="a", sampling=sampling)]
        assert [token for part in answer for token in part["token_ids"]] == [1, 2, 3]
        assert answer[-1]["finish_reason"] == "length"


async def test_a_caller_that_stops_iterating_stops_the_engine(mesh: Mesh) -> None:
    loads: dict[str, int] = {}

    async def on_load(load: Load) -> None:
        loads[load.instance] = load.running + load.waiting

    bus = await Bus.connect(mesh.options, "watch")
    await bus.subscribe(bus.subjects.load_all, MessageDecoder(Load), on_load)
    async with KvRouter.connect(MODEL, mesh.options, timeout=30) as router:
        stream = router.generate(PROMPT, sampling=Sampling(max_tokens=4000, ignore_eos=True))
        assert await anext(stream)
        await eventually(lambda: sum(loads.values()) == 1)
        await stream.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: sum(loads.values()) == 0)
    await bus.close()


async def test_a_model_without_workers_raises(options: BusOptions, bus: Bus) -> None:
    with pytest.raises(NoWorkers, match="nobody"):
        async with KvRouter.connect("nobody", options, timeout=0.2):
            pass
    with pytest.raises(RouterConfigError, match="policy"):
        async with KvRouter.connect("m", options, RouterSettings(policy="fastest")):
            pass


async def test_placements_of_an_embedded_router_count_in_the_mesh(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    async with (
        running_workers(bus, limits, "a", "b"),
        KvRouter.connect("m", options) as one,
        KvRouter.connect("m", options) as other,
    ):
        home = (await one.best_worker(PROMPT, request_id="1")).worker_id

        async def counted() -> bool:
            loads = await other.get_potential_loads(PROMPT)
            return {p["worker_id"] for p in loads if p["active_requests"]} == {home}

        await eventually(counted)
