"""An agents' trace on vLLM's own server: without and with kvmesh's plugin beside it.

    python benchmarks/vllm_alone.py [--agents 6] [--turns 8] [--jobs 2] [--rounds 3]

Needs vLLM; runs on the CPU with a model of 3 MB. Agents share a system prompt; each of their turns
repeats the conversation and adds to it. Between two turns other callers send one-off prompts, more
than the cache holds. A server with the plugin, on which the agents mark their prompts with
`cache_control`, and one without get the same requests; one after the other, since an idle vLLM
keeps its cores busy for a second. Prints the share of the agents' prompt tokens that was cached,
the time to the first token of agents and of others, and the CPU seconds (medians over the rounds).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from common import cpu_seconds

FLAGS = ["--kv-transfer-config", '{"kv_connector":"KvmeshRetentionConnector","kv_role":"kv_both"}']
HINT = json.dumps({"cache_control": {"ttl": "10m"}})
START_S = 400.0


@dataclass(frozen=True)
class Scale:
    """Tokens of the trace's parts, and vLLM's blocks of `block` tokens; `arguments` are vLLM's."""

    block: int = 32
    blocks: int = 400
    context: int = 2048
    system: int = 512
    turn: int = 96
    answer: int = 16
    job: int = 1000
    arguments: tuple[str, ...] = ("--enforce-eager",)


@dataclass
class Figures:
    """Times to the first token in seconds, and token counts: `total` of all, others of agents."""

    agents: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    total: int = 0


class Server:
    """A vLLM server in a process of its own."""

    def __init__(self, model: Path, folder: Path, plugin: bool, scale: Scale) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.plugin = plugin
        self.scale = scale
        self.figures = Figures()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "tiny", "--port", str(port)]
        command += ["--host", "127.0.0.1", "--block-size", str(scale.block)]
        command += ["--num-gpu-blocks-override", str(scale.blocks)]
        command += ["--max-model-len", str(scale.context), *scale.arguments]
        command += ["--enable-prompt-tokens-details", *(FLAGS if plugin else [])]
        env = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if plugin:
            env["VLLM_PLUGINS"] = "kvmesh"
        self.log = folder / f"server-{plugin}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, start_new_session=True
            )

    async def ready(self, http: aiohttp.ClientSession) -> None:
        """Wait until the server serves; exits with the end of its log if it does not."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{self.url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
        raise SystemExit(f"vLLM did not start:\n{self.log.read_text()[-2000:]}")

    async def ask(
        self, http: aiohttp.ClientSession, prompt: list[int], is_agent: bool
    ) -> list[int]:
        """Stream one completion; returns its tokens."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": self.scale.answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if is_agent and self.plugin:
            body["vllm_xargs"] = {"kvmesh": HINT}
        tokens: list[int] = []
        start, first = time.perf_counter(), 0.0
        async with http.post(f"{self.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                first = first or time.perf_counter() - start
                for choice in chunk["choices"]:
                    tokens += choice["token_ids"]
                if usage := chunk.get("usage"):
                    self.figures.total += usage["total_tokens"]
                    if is_agent:
                        details = usage.get("prompt_tokens_details") or {}
                        self.figures.prompt += usage["prompt_tokens"]
                        self.figures.cached += details.get("cached_tokens") or 0
        (self.figures.agents if is_agent else self.figures.others).append(first)
        return tokens

    def cpu_s(self) -> float:
        """CPU seconds of all live processes of the server so far; it has a session of its own."""
        found = 0.0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pid = int(folder.name)
                if os.getsid(pid) == self.process.pid:
                    found += cpu_seconds(pid)
        return found

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@dataclass
class Replay:
    """The figures of one server, with its CPU seconds and the seconds of the trace."""

    figures: Figures
    cpu_s: float
    seconds: float


async def replay(server: Server, options: argparse.Namespace) -> Replay:
    """Send the trace; agents take their turns at the same time if `options.concurrent`."""
    chance, scale = random.Random(options.seed), server.scale

    def tokens(count: int) -> list[int]:
        return [chance.randrange(8000) for _ in range(count)]

    async def turn(prompt: list[int], jobs: list[list[int]]) -> None:
        prompt += await server.ask(http, prompt, is_agent=True)
        for job in jobs:
            await server.ask(http, job, is_agent=False)

    system = tokens(scale.system)
    prompts = [list(system) for _ in range(options.agents)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as http:
        await server.ready(http)
        await server.ask(http, [1] * scale.job, is_agent=False)
        server.figures = Figures()
        before, start = server.cpu_s(), time.perf_counter()
        for _ in range(options.turns):
            turns = []
            for prompt in prompts:
                prompt += tokens(scale.turn)
                turns.append(turn(prompt, [tokens(scale.job) for _ in range(options.jobs)]))
            if options.concurrent:
                await asyncio.gather(*turns)
            else:
                for each in turns:
                    await each
        seconds = time.perf_counter() - start
        return Replay(server.figures, server.cpu_s() - before, seconds)


def run(
    model: Path, folder: Path, plugin: bool, options: argparse.Namespace, scale: Scale
) -> Replay:
    """Replay the trace on a server of its own."""
    server = Server(model, folder, plugin, scale)
    try:
        return asyncio.run(replay(server, options))
    finally:
        server.close()


def columns(found: Replay) -> list[float]:
    """Cached share, median milliseconds of agents and of others, and CPU seconds."""
    figures = found.figures
    times = [statistics.median(times) * 1e3 for times in (figures.agents, figures.others)]
    return [100 * figures.cached / figures.prompt, *times, found.cpu_s]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2, help="one-off prompts after each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrent", action="store_true", help="all agents at the same time")
    options = parser.parse_args()
    from kvmesh.worker.models.tiny_model import make_tiny_model

    rounds: dict[bool, list[list[float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "tiny")
        for _ in range(options.rounds):
            for plugin, figures in rounds.items():
                found = run(folder / "tiny", folder, plugin, options, Scale())
                figures.append(columns(found))
    print(f"{options.agents} agents, {options.turns} turns, {options.jobs} jobs after each turn")
    print(f"{'':24}{'cached %':>10}{'agents ms':>11}{'others ms':>11}{'CPU s':>8}")
    for plugin, figures in rounds.items():
        row = [statistics.median(column) for column in zip(*figures, strict=True)]
        name = "vLLM with the plugin" if plugin else "vLLM"
        print(f"{name:24}{row[0]:>10.0f}{row[1]:>11.1f}{row[2]:>11.1f}{row[3]:>8.1f}")


if __name__ == "__main__":
    main()
