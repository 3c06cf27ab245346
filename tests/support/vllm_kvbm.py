"""A real vLLM that shares its blocks, beside a kvbm process."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Clear, Sampling
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.settings import Settings
from kvmesh.settings.schema import NatsSettings, StreamSettings, VllmSettings, WorkerSettings
from kvmesh.worker.capabilities import Tiered
from kvmesh.worker.engine import Engine, EngineContext, EngineInfo, create_engine
from support.mesh import Mesh
from support.nats import NatsServer
from support.recorder import Recorder
from support.vllm import ARGS, SIZE, prompt, work
from support.wait import eventually

Logprobs = list[dict[int, float]]
PLUGIN = """
import os
import torch

def register():
    from kvmesh.worker.engines.vllm.kvbm.worker_side import WorkerSide
    load, load_group = WorkerSide.load, WorkerSide._load_group
    def is_on(fault):
        folder = os.environ.get("FAULTS")  # the process of the tests outlives the folder
        return folder is not None and os.path.exists(os.path.join(folder, fault))
    def load_or_fail(self, blocks):
        if is_on("lost"):
            blocks.groups.clear()
        return load(self, blocks)
    def load_zeros(self, group, caches, host):
        has_state = caches[0].dtype is torch.int8
        wrong = is_on("zeros") or has_state and is_on("zero states")
        return load_group(self, group, caches, torch.zeros_like(host) if wrong else host)
    WorkerSide.load, WorkerSide._load_group = load_or_fail, load_zeros
"""


class KvbmRun:
    """A vLLM that shares its blocks, beside the kvbm process `kvbm-0` of a mesh."""

    def __init__(self, mesh: Mesh, model: Path, vllm: VllmSettings) -> None:
        self.mesh = mesh
        settings = Settings(
            nats=NatsSettings(url=mesh.nats_url, namespace=mesh.namespace),
            streams=StreamSettings(lease_s=1),
            vllm=replace(vllm, args=[*ARGS, *vllm.args], kvbm=True),
            worker=WorkerSettings(engine="vllm", block_size=SIZE, node="here", served_name="tiny"),
        )
        self.sink = Recorder()
        self.engine: Engine = create_engine(EngineContext(settings, model))
        self.info: EngineInfo

    async def generate(self, name: str, tokens: bytes, **fields: object) -> list[int]:
        self.engine.submit(replace(work(name, tokens), **fields))
        await eventually(lambda: self.sink.finish(name), timeout=60, what=name)
        return self.sink.tokens(name)

    async def logprobs(self, name: str, tokens: bytes, **fields: object) -> Logprobs:
        """The log probabilities of the five likeliest tokens at each of eight positions."""
        sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=5)
        await self.generate(name, tokens, sampling=sampling, **fields)
        deltas = self.sink.deltas[name]
        return [row for delta in deltas for row in delta.logprobs or []]

    async def clear_cache(self) -> None:
        """Empty vLLM's own cache."""
        await asyncio.wait_for(self.engine.drain(), 30)
        await self.engine.clear(Clear())
        await self.generate("marker", prompt(SIZE + 1, first=3999))
        self.sink.deltas.clear()

    async def onboarded(self, tokens: bytes, depth: int, **fields: object) -> Logprobs:
        """Repeat a prompt until `depth` of its tokens were loaded, as the request "loaded"."""
        for _ in range(30):
            await self.clear_cache()
            found = await self.logprobs("loaded", tokens, **fields)
            if self.sink.cached("loaded") == depth:
                return found
            await asyncio.sleep(0.5)
        raise AssertionError(f"loaded {self.sink.cached('loaded')} tokens, not {depth}")

    def loaded_blocks(self) -> int:
        """Blocks loaded from the kvbm's memory."""
        assert isinstance(self.engine, Tiered)
        counts = self.engine.tier_counts()
        return counts.loaded[1] if counts is not None else 0


@asynccontextmanager
async def kvbm_mesh(nats_server: NatsServer, folder: Path) -> AsyncIterator[Mesh]:
    """A mesh of one kvbm."""
    env = {
        "KVMESH_KVBM_NODE": "here",
        "KVMESH_KVBM_DIRECTORY": str(folder / "node"),
        "KVMESH_KVBM_HOST_BYTES": str(16 << 20),
    }
    mesh = Mesh(nats_server.url, folder, env)
    bus = await Bus.connect(mesh.options, "test")
    await ensure_streams(bus, StreamLimits(lease_s=1))
    await bus.close()
    mesh.start("kvbm", "kvbm-0")
    try:
        yield mesh
    finally:
        mesh.stop()


@asynccontextmanager
async def kvbm_run(
    nats_server: NatsServer, folder: Path, model: Path, *args: str, **fields: object
) -> AsyncIterator[KvbmRun]:
    """A vLLM with additional arguments and settings, beside a kvbm."""
    async with kvbm_mesh(nats_server, folder) as mesh:
        run = KvbmRun(mesh, model, replace(VllmSettings(args=list(args)), **fields))
        try:
            run.info = await run.engine.start(run.sink)
            yield run
        finally:
            await run.engine.close()


@contextmanager
def faulty_loads(folder: Path) -> Iterator[None]:
    """Make vLLM's processes load zeros, zero states or nothing, while `folder` has such a file.

    The file is named `zeros`, `zero states` or `lost`.
    A plugin of vLLM's changes the connector; it is found in `folder`.
    """
    (folder / "faulty_loads.py").write_text(PLUGIN)
    info = folder / "faulty_loads-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-loads\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nfaulty_loads = faulty_loads:register\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTS", str(folder))
        given = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), given]).strip(os.pathsep))
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield


@contextmanager
def cached_mla() -> Iterator[None]:
    """Let vLLM reuse prefixes of MLA models on a CPU, which it does not do by itself.

    Its kernels there differ more between a prompt computed whole and in parts than a test could
    allow, with and without a block manager: only its own cached prefix can be compared with.
    """
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def keep_prefix_caching(config: Any) -> None:
        wanted = config.cache_config.enable_prefix_caching
        update(config)
        config.cache_config.enable_prefix_caching = wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keep_prefix_caching))
        yield
