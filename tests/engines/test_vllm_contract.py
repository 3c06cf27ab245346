"""vLLM beyond the parameters of its methods: errors, rewritten settings, abilities of classes."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.engines import prompt
from support.vllm import ARGS, SIZE, work

from kvmesh.bus.messages import Clear, encode
from kvmesh.settings import Settings
from kvmesh.settings.schema import VllmSettings, WorkerSettings
from kvmesh.worker.adapters.kv_events.cache_events import AllCleared, BlocksStored, CacheEvent
from kvmesh.worker.adapters.kv_events.decoder import EventDecoder
from kvmesh.worker.adapters.kv_events.subscriber import rank_endpoint
from kvmesh.worker.adapters.request_streams import EngineUnavailable
from kvmesh.worker.engine import EngineConfigError, EngineContext, EngineError, Rejected
from kvmesh.worker.engines.vllm.retention.settings import CONNECTOR as RETENTION
from kvmesh.worker.engines.vllm.transfer_config import connectors_of, transfer_config_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
HANDING = ["NixlConnector", "NixlPullConnector", "NixlPushConnector"]
BLIND = ["ExampleConnector", "HF3FSKVConnector", "LMCacheConnectorV1"]
REWRITE = "_post_init_kv_transfer_config"


def errors() -> Iterator[BaseException]:
    """One of each kind of error that vLLM declares."""
    from vllm import exceptions
    from vllm.v1.engine import exceptions as of_engine

    modules: list[ModuleType] = [exceptions, of_engine]
    for module in modules:
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, exceptions.VLLMError):
                yield made(kind)


def made(kind: type[Any]) -> Any:
    for arguments in ((), ("why",), ("why", HTTPStatus.CONFLICT)):
        try:
            return kind(*arguments)
        except TypeError:
            continue
    raise AssertionError(f"{kind} takes other arguments")


async def outcome(error: BaseException) -> type[BaseException]:
    """The error with which a request ends if `generate` raises `error`."""
    from kvmesh.worker.engines.vllm.adapters import VllmAdapters
    from kvmesh.worker.engines.vllm.engine import VllmEngine
    from kvmesh.worker.engines.vllm.scheduler_stats import RankStats
    from kvmesh.worker.engines.vllm.sleep_mode import SleepMode
    from kvmesh.worker.start.timeline import StartTimeline

    class Llm:
        async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            for _ in ():
                yield
            raise error

    timeline, mode = StartTimeline(), SleepMode(1, "")
    engine = VllmEngine({}, VllmAdapters({}), "tiny", 1.0, False, {}, timeline, mode)
    engine._llm, engine._stats = Llm(), [RankStats()]
    with pytest.raises((EngineError, EngineUnavailable, Rejected)) as raised:
        async for _ in engine._generate(
            work("r", prompt(8)), engine._sampling(work("r", prompt(8)))
        ):
            pass
    return raised.type


async def test_each_error_that_leaves_generate_ends_the_request() -> None:
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    seen = list(errors())
    assert len(seen) > 10
    for error in seen:
        expected: type[BaseException] = EngineUnavailable
        if isinstance(error, EngineDeadError):
            expected = EngineError
        elif isinstance(error, VLLMClientError):
            expected = Rejected
        assert await asyncio.wait_for(outcome(error), 30) is expected, error


def test_connectors_are_known_by_their_abilities() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvmesh.worker.engines.vllm.connectors.known import (
        connector_class,
        hands_off,
        ignores_tenants,
    )

    configs = [{"kv_connector": n, "kv_role": "kv_both"} for n in KVConnectorFactory._registry]
    known = [config for config in configs if connector_class(config) is not None]
    assert {c["kv_connector"] for c in known} >= {*HANDING, *BLIND, "OffloadingConnector"}
    assert sorted(c["kv_connector"] for c in known if hands_off(c)) == HANDING
    assert sorted(c["kv_connector"] for c in known if ignores_tenants(c)) == BLIND
    assert not hands_off({"kv_connector": "OfNobody", "kv_role": "kv_both"})


@pytest.mark.parametrize(("backend", "simple"), [("native", 0), ("native", 1), ("lmcache", 0)])
def test_vllm_makes_the_same_connector_of_its_arguments(
    backend: str, simple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig

    from kvmesh.worker.engines.vllm.connectors.offloading import EXTRA, with_offloading

    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", str(simple))
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(kv_offloading_size=2.0, kv_offloading_backend=backend),
        kv_transfer_config=None,
    )
    getattr(VllmConfig, REWRITE)(config)
    (ours,) = with_offloading(None, 2.0, backend, bool(simple))
    made = config.kv_transfer_config
    assert made.kv_connector == ours["kv_connector"]
    assert (made.kv_role, made.kv_connector_extra_config) == (ours["kv_role"], ours[EXTRA])


def test_the_plugin_keeps_its_connector_beside_vllm_s_offloading() -> None:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig

    from kvmesh.worker.engines.vllm.connectors.offloading import BYTES, DESCRIBED
    from kvmesh.worker.engines.vllm.plugin.general import register

    register()
    register()
    extra = {"kvmesh": {"budget": 0.7}}
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(kv_offloading_size=2.0, kv_offloading_backend="native"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=RETENTION, kv_role="kv_both", kv_connector_extra_config=extra
        ),
    )
    for _ in range(2):  # vLLM makes some configurations anew
        getattr(VllmConfig, REWRITE)(config)
        first, second = connectors_of(transfer_config_of(config))
        assert (first["kv_connector"], first["kv_connector_extra_config"]) == (RETENTION, extra)
        assert second["kv_connector"] == "OffloadingConnector"
        assert second["kv_connector_extra_config"] == {BYTES: 2 << 30, DESCRIBED: True}


def test_retention_alone_keeps_the_lookahead_of_a_draft_in_block_hashes() -> None:
    from vllm.config import VllmConfig

    from kvmesh.worker.engines.vllm.plugin.general import register

    register()
    lookahead = getattr(VllmConfig, "num_hash_lookahead_tokens", None)
    if lookahead is None:
        pytest.skip("this vLLM hashes no lookahead")

    def tokens(connector: str | None) -> int:
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                use_eagle_block_drop=lambda: True, disable_lookahead_block_hashes=False
            ),
            cache_config=SimpleNamespace(enable_prefix_caching=True),
            kv_transfer_config=connector and SimpleNamespace(kv_connector=connector),
            num_prefill_lookahead_tokens=1,
        )
        found: int = lookahead.fget(config)
        return found

    assert [tokens(None), tokens(RETENTION), tokens("OffloadingConnector")] == [1, 1, 0]


def test_a_connector_with_addresses_of_the_kv_does_not_sleep() -> None:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvmesh.worker.engines.vllm.kvbm.connector import KvmeshConnector

    given = KVTransferConfig(kv_connector="KvmeshConnector", kv_role="kv_both")
    assert not KvmeshConnector.supports_sleep_mode(given)
    if not hasattr(KVConnectorBase_V1, "supports_sleep_mode"):
        pytest.skip("this vLLM does not ask")
    # an inherited answer would be yes
    assert "supports_sleep_mode" in vars(KvmeshConnector)


def vllm_config(model: Path, *args: str, **worker: Any) -> Any:
    """The configuration that vLLM makes of a worker's settings, checked."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from kvmesh.worker.engines.vllm.connectors.outcome import check_connectors
    from kvmesh.worker.engines.vllm.create import create

    settings = Settings(
        vllm=VllmSettings(args=[*ARGS, *args], kvbm=True),
        worker=WorkerSettings(engine="vllm", block_size=SIZE, **worker),
    )
    engine = create(EngineContext(settings, model))
    config = AsyncEngineArgs(**engine._arguments).create_engine_config()
    check_connectors(engine._arguments["kv_transfer_config"], config)
    return config


def test_one_setting_adds_offloading_to_handoff_block_manager_and_retention(
    tiny_model: Path,
) -> None:
    config = vllm_config(tiny_model, "kv_offloading_size=1", serves="decode")
    found = [c["kv_connector"] for c in connectors_of(transfer_config_of(config))]
    assert found == ["NixlConnector", "OffloadingConnector", "KvmeshConnector", RETENTION]


@pytest.mark.parametrize(
    "argument", ["kv_offloading_size=much", "kv_offloading_size=0", "kv_offloading_backend=tape"]
)
def test_an_unusable_size_or_backend_is_refused(tiny_model: Path, argument: str) -> None:
    arguments = ["kv_offloading_size=1", argument]
    with pytest.raises(EngineConfigError, match=argument.partition("=")[0]):
        vllm_config(tiny_model, *arguments)


def test_connectors_that_vllm_has_replaced_are_named() -> None:
    from kvmesh.worker.engines.vllm.connectors.outcome import changed_arguments, check_connectors

    transfer = SimpleNamespace(
        kv_connector="LMCacheConnectorV1",
        kv_connector_module_path=None,
        kv_role="kv_both",
        kv_connector_extra_config={},
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
        scheduler_config=SimpleNamespace(policy="fcfs"),
    )
    with pytest.raises(EngineConfigError, match=r"KvmeshRetentionConnector.*LMCacheConnectorV1"):
        check_connectors({"kv_connector": RETENTION}, config)
    asked = {"scheduling_policy": "priority", "enable_prefix_caching": True}
    warnings = changed_arguments(asked, config)
    assert sorted(warnings) == ["no_kv_events", "no_priority", "tenants_share_kv"]
    assert "LMCacheConnectorV1" in warnings["tenants_share_kv"]
    config.cache_config.enable_prefix_caching = False
    assert "no_prefix_cache" in changed_arguments(asked, config)
    chosen = {"scheduling_policy": "fcfs", "kv_events_config": {}}
    assert sorted(changed_arguments(chosen, config)) == ["tenants_share_kv"]


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "ipc:///run/kv/tcp-events:1"])
@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_publish_where_a_subscriber_looks(endpoint: str, rank: int) -> None:
    from vllm.distributed.kv_events import ZmqEventPublisher

    assert ZmqEventPublisher.offset_endpoint_port(endpoint, rank) == rank_endpoint(endpoint, rank)


def test_ranks_are_numbered_over_all_servers_of_a_deployment() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import MPClient

    publisher = inspect.getsource(Scheduler.__init__).partition("EventPublisherFactory")[2]
    assert "data_parallel_index" in publisher.partition("\n\n")[0]
    assert "engine_ranks_managed" in inspect.getsource(MPClient.__init__)
    assert "engine_idxs=self.engine_core.engine_ranks_managed" in inspect.getsource(AsyncLLM)


@pytest.mark.parametrize("disk", [False, True])
def test_a_cleared_store_leaves_what_the_device_has(tiny_model: Path, disk: bool) -> None:
    from support.event_streams.keys import PLAIN
    from support.event_streams.record_vllm import FULL, HOST_BYTES
    from support.event_streams.stream import Message, StreamWriter
    from support.event_streams.vllm_cache import SmallScheduler

    from kvmesh.worker.engines.vllm.retention.connector import _clear_stores

    about = {"engine": "vllm", "version": "", "mode": "", "how": "", "model": "m"}
    writer = StreamWriter(**about, block_size=32, counted=True)
    extra: dict[str, Any] = {"cpu_bytes_to_use": HOST_BYTES}
    if disk:
        extra |= {"kv_offload_backend": "disk", "disk_path": "unused"}
        extra["disk_capacity_bytes"] = HOST_BYTES
    name = "SimpleCPUOffloadConnector"
    connector = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    small = SmallScheduler(writer, tiny_model, [FULL], connector=connector)
    try:
        small.run(small.request(list(range(100)), PLAIN))
        small.settle()
        assert _clear_stores(small.scheduler, encode(Clear())) == {}
        small.settle()
    finally:
        small.close()
    decoder, found = EventDecoder(), list[CacheEvent]()
    for step in writer.stream.steps:
        if isinstance(step, Message):
            found += decoder.decode(step.payload)
    below = 2 if disk else 1
    assert {each.tier for each in found if isinstance(each, BlocksStored)} == {0, below}
    assert [each for each in found if isinstance(each, AllCleared)] == [AllCleared(below)]
