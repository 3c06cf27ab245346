"""First tokens of clients before, and while `kvmesh fleet roll` replaces the workers under them.

    .venv/bin/python benchmarks/roll.py [--workers 8] [--clients 16] [--service worker]

The clients stream 60 tokens, wait a little, and send their next prompt; each output is compared
with the known one. Prints quantiles of both phases, failed and wrong outputs, and the roll's time.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from openai import AsyncOpenAI, OpenAIError
from support.up import Up

TOKENS = 60
THINK_S = 0.3
BEFORE_S = 30.0


class Clients:
    """Clients that stream outputs, and measure the times to their first tokens."""

    def __init__(self, url: str, number: int) -> None:
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._prompts = [f"Question {n}, and what is asked in it. " * 20 for n in range(number)]
        self._answers: dict[str, str] = {}
        self._ttft: list[float] = []
        self.failed: list[str] = []
        self.wrong = 0

    def take(self) -> list[float]:
        """The times since the last call, ascending."""
        taken, self._ttft = sorted(self._ttft), []
        return taken

    async def learn(self) -> None:
        for prompt in self._prompts:
            self._answers[prompt] = await self._stream(prompt)

    async def run(self, number: int) -> None:
        """Send the prompts of one client until cancelled."""
        prompt = self._prompts[number]
        while True:
            try:
                self.wrong += await self._stream(prompt) != self._answers[prompt]
            except OpenAIError as error:
                self.failed.append(repr(error))
            await asyncio.sleep(random.uniform(0, 2 * THINK_S))

    async def _stream(self, prompt: str) -> str:
        sent, text = time.monotonic(), ""
        chunks = await self._client.chat.completions.create(
            model="kvmesh-demo",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in chunks:
            part = "".join(choice.delta.content or "" for choice in chunk.choices)
            if part and not text:
                self._ttft.append(time.monotonic() - sent)
            text += part
        return text


def shown(name: str, times: list[float]) -> str:
    quantiles = [times[int(share * (len(times) - 1))] for share in (0.5, 0.9, 0.99)]
    texts = "  ".join(f"{1000 * each:7.1f}" for each in quantiles)
    return f"{name:<8} {len(times):>6}  {texts}"


async def measure(workers: int, clients: int, service: str, folder: Path) -> None:
    up = Up(folder, "--workers", str(workers), "--frontend-access-log", "off")
    up.start()
    try:
        await up.ready()
        load = Clients(up.url, clients)
        await load.learn()
        tasks = [asyncio.create_task(load.run(number)) for number in range(clients)]
        await asyncio.sleep(5)
        load.take()
        await asyncio.sleep(BEFORE_S)
        before = load.take()
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvmesh.cli.main", "fleet", "roll", service, "--watch", "3"),
            *("--nats", up.nats_url, "--nats-token-file", str(up.token_file)),
        )
        status = await process.wait()
        took, during = time.monotonic() - began, load.take()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    finally:
        up.close()
    print(f"{'phase':<8} {'count':>6}  {'p50 ms':>7}  {'p90 ms':>7}  {'p99 ms':>7}")
    print(shown("before", before))
    print(shown("roll", during))
    print(
        f"status {status}, {took:.1f} s, {len(load.failed)} failed, {load.wrong} wrong",
        load.failed[:3],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--service", default="worker")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(measure(given.workers, given.clients, given.service, Path(scratch)))
