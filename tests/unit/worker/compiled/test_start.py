"""The compile cache of a worker that starts, and a start that fails."""

import os
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.runtime.service import StartError
from kvmesh.settings import Settings
from kvmesh.settings.schema import WeightsSettings, WorkerSettings
from kvmesh.worker.compiled.cache import VARIABLES
from kvmesh.worker.compiled.start import compile_cache

NO_BUS = cast(Bus, None)  # without a key, nobody asks the mesh


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    weights = WeightsSettings(
        compile_cache=True, cache_directory=tmp_path / "compiled", directory=tmp_path / "store"
    )
    return Settings(weights=weights, worker=WorkerSettings(engine="vllm"))


def kernel() -> Path:
    return Path(os.environ["VLLM_CACHE_ROOT"], "torch_compile_cache", "kernel.so")


def compile_kernel() -> None:
    kernel().parent.mkdir(parents=True)
    kernel().write_bytes(b"code")


async def start(
    settings: Settings, folder: Path, error: Exception | None = None, runs: bool = False
) -> bool:
    """Start an engine, which compiles if it must; returns True if it had to."""
    async with compile_cache(settings, folder, NO_BUS, None) as cache:
        assert cache is not None
        cold = not kernel().exists()
        if cold:
            compile_kernel()
        if error is None or runs:
            cache.engine_runs()
        if error is not None:
            raise error
    return cold


async def test_variables_are_set_within_the_block(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_me")
    async with compile_cache(settings, tmp_path, NO_BUS, None):
        found = {os.environ[name] for name in VARIABLES}
        assert all(path.startswith(str(tmp_path / "compiled")) for path in found)
    left = {name: os.environ.get(name) for name in VARIABLES}
    assert left == {**dict.fromkeys(VARIABLES), "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_me"}


@pytest.mark.parametrize(
    ("error", "cold"),
    [
        (StartError("vLLM failed to start", permanent=False), True),
        (StartError("an argument is wrong", permanent=True), False),
        (KeyError("stopped while it started"), False),
    ],
)
async def test_only_a_failed_engine_makes_its_cache_suspect(
    error: Exception, cold: bool, settings: Settings, tmp_path: Path
) -> None:
    assert await start(settings, tmp_path)
    assert not await start(settings, tmp_path)
    with pytest.raises(type(error)):
        await start(settings, tmp_path, error)
    assert await start(settings, tmp_path) is cold


async def test_a_failure_after_the_engines_start_is_not_the_caches(
    settings: Settings, tmp_path: Path
) -> None:
    assert await start(settings, tmp_path)
    error = StartError("no model files", permanent=False)
    with pytest.raises(StartError, match="no model files"):
        await start(settings, tmp_path, error, runs=True)
    assert not await start(settings, tmp_path)


@pytest.mark.parametrize("change", [{"engine": "torch"}, {"engine": "mock"}])
async def test_other_engines_have_no_cache(
    change: dict[str, Any], settings: Settings, tmp_path: Path
) -> None:
    settings = replace(settings, worker=replace(settings.worker, **change))
    async with compile_cache(settings, tmp_path, NO_BUS, None) as cache:
        assert cache is None


async def test_a_malformed_key_ends_the_start(settings: Settings, tmp_path: Path) -> None:
    settings = replace(settings, weights=replace(settings.weights, domain_key="beef"))
    with pytest.raises(StartError, match=r"weights\.domain_key must be 64"):
        async with compile_cache(settings, tmp_path, NO_BUS, None):
            pass
