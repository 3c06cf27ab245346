"""The embedded router, against real workers."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.mesh import Mesh
from support.nats import NatsServer
from support.routers import running_workers
from support.wait import eventually

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.messages import Load, MessageDecoder, Placement, Sampling
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.router.embedded import EmbeddedRouter
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


async def both(router: EmbeddedRouter) -> bool:
    """True if both workers are known."""
    return len(await router.potential_loads(PROMPT)) == 2


async def test_a_prompt_is_placed_counted_and_freed(mesh: Mesh) -> None:
    async with EmbeddedRouter.connect(MODEL, mesh.options, timeout=30) as router:
        await eventually(lambda: both(router))
        prompt = [9, *PROMPT[1:]]
        first = await router.best_worker(prompt, "one")
        assert first.overlap == 0
        carried = {p.instance: p for p in await router.potential_loads(prompt)}
        assert carried[first.instance].active_requests == 1
        assert carried[first.instance].prefill_tokens == 500 + 500 - 496, "31 blocks are predicted"
        await router.mark_prefilled("one")
        again = await router.best_worker(prompt, update=False)
        assert again == (first.instance, 0, 31)
        elsewhere = await router.best_worker(
            prompt, update=False, placement=Placement(exclude=[first.instance])
        )
        assert elsewhere.instance != first.instance
        await router.free("one")
        assert {p.active_requests for p in await router.potential_loads(PROMPT)} == {0}
        with pytest.raises(InvalidRouteRequest):
            await router.best_worker(PROMPT, overrides={"nonsense": 1.0})
        with pytest.raises(ValueError, match="token id"):
            await router.best_worker([-1])
        with pytest.raises(RouteError, match="nobody"):
            await router.best_worker(PROMPT, "two", placement=Placement(instance="nobody"))


async def test_tokens_are_generated_and_the_cache_is_known(mesh: Mesh) -> None:
    async with EmbeddedRouter.connect(MODEL, mesh.options, timeout=30) as router:
        prompt = [7, *PROMPT]
        sampling = Sampling(max_tokens=40, ignore_eos=True)
        tokens = [t async for part in router.generate(prompt, sampling) for t in part]
        assert len(tokens) == 40
        held = await router.best_worker(prompt, update=False)
        assert held.overlap == 31
        assert {p.active_requests for p in await router.potential_loads(prompt)} == {0}
        with pytest.raises(GenerationError):
            async for _ in router.generate([7] * 400_000, Sampling(max_tokens=1)):
                pass


async def test_a_caller_that_stops_iterating_stops_the_engine(mesh: Mesh) -> None:
    loads: dict[str, int] = {}

    async def on_load(load: Load) -> None:
        loads[load.instance] = load.running + load.waiting

    bus = await Bus.connect(mesh.options, "watch")
    await bus.subscribe(bus.subjects.load_all, MessageDecoder(Load), on_load)
    async with EmbeddedRouter.connect(MODEL, mesh.options, timeout=30) as router:
        stream = router.generate(PROMPT, Sampling(max_tokens=4000, ignore_eos=True))
        assert await anext(stream)
        await eventually(lambda: sum(loads.values()) == 1)
        await stream.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: sum(loads.values()) == 0)
    await bus.close()


async def test_a_model_without_workers_raises(options: BusOptions, bus: Bus) -> None:
    with pytest.raises(NoWorkers, match="nobody"):
        async with EmbeddedRouter.connect("nobody", options, timeout=0.2):
            pass
    with pytest.raises(RouterConfigError, match="policy"):
        async with EmbeddedRouter.connect("m", options, RouterSettings(policy="fastest")):
            pass


async def test_placements_of_an_embedded_router_count_in_the_mesh(
    bus: Bus, options: BusOptions, limits: StreamLimits
) -> None:
    async with (
        running_workers(bus, limits, "a", "b"),
        EmbeddedRouter.connect("m", options) as one,
        EmbeddedRouter.connect("m", options) as other,
    ):
        home = (await one.best_worker(PROMPT, "1")).instance

        async def counted() -> bool:
            loads = await other.potential_loads(PROMPT)
            return {p.instance for p in loads if p.active_requests} == {home}

        await eventually(counted)
