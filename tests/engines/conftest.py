"""Fixtures of the tests that run real engines: a tiny model, a NATS server, vLLM's environment."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nats import NatsServer


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
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kvmesh.worker.engines.torch.model.tiny import make_tiny_model

    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()
