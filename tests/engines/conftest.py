"""Fixtures of the tests that run real engines: a tiny model, a NATS server, vLLM's environment."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import tiny
from support.nats import NatsServer

LONGEST = {"test_vllm_trust.py", "test_vllm_kvbm_models.py", "test_vllm.py", "test_vllm_mesh.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest modules first: of two processes, neither is left with one of them at the end."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session", autouse=True)
def vllm_environment() -> Iterator[None]:
    """Little memory, no usage statistics, no time spent on compiling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        # several at once, which would all bind themselves to the same cores
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        # data-parallel ranks share the machine's memory node: vLLM 0.33 wants one for each
        patch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "0")
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return tiny.tiny_model()


@pytest.fixture(scope="session")
def slow_model() -> Path:
    """vLLM computes fast: its layers have to be larger than the torch engine's."""
    return tiny.slow_model(16384)


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()
