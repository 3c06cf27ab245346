"""Losses of requests beside a prefetch on vLLM, in slices or as one request of lowest priority.

    python benchmarks/vllm_prefetch.py [--tokens 12000] [--rounds 7]

Needs vLLM; runs on the CPU with a model of 3 MB. In each round, each of three variants (no
prefetch, the engine's prefetch in slices, the whole prompt as one request for one token) has the
same two loads: requests of 64 tokens that arrive one after the other, and four that decode
together. A prefetch of a new prompt runs during all of them. Prints the mean time to the token of
an arriving request and the time of the decoding, as medians of the rounds, with the ratio to no
prefetch of the same round, and the time of a prefetch alone.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

from kvmesh.bus.messages import KvEvent, Prefetch, Sampling, Work
from kvmesh.settings import Settings
from kvmesh.settings.schema import VllmSettings, WorkerSettings
from kvmesh.worker.engine import EngineContext, EngineError, OutputDelta, create_engine
from kvmesh.worker.enginecore.retention_request import PREFETCH_PRIORITY

BLOCK = 32
VARIANTS = ("none", "slices", "whole")
ARRIVALS, DECODING, ANSWER = 30, 4, 300


class Output:
    """The sink of the engine: waits for tokens and ends of requests."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.ended: dict[str, asyncio.Event] = {}

    def output(self, deltas: Sequence[OutputDelta]) -> None:
        for delta in deltas:
            self.tokens[delta.request] = self.tokens.get(delta.request, 0) + len(delta.tokens)
            if delta.finish:
                self.ended.setdefault(delta.request, asyncio.Event()).set()

    def events(self, rank: int, events: Sequence[KvEvent]) -> None:
        pass

    def events_lost(self, rank: int, count: int) -> None:
        pass

    def failed(self, error: EngineError) -> None:
        raise SystemExit(str(error))


class Load:
    """One vLLM and the requests of the benchmark."""

    def __init__(self, model: Path, tokens: int) -> None:
        blocks = 4 * (tokens // BLOCK) + 512
        arguments = [
            "enforce_eager=true",
            "dtype=float32",
            f"num_gpu_blocks_override={blocks}",
            f"max_model_len={tokens + 4 * BLOCK}",
            "max_num_seqs=16",
        ]
        worker = WorkerSettings(engine="vllm", block_size=BLOCK)
        settings = Settings(vllm=VllmSettings(args=arguments), worker=worker)
        self.engine: Any = create_engine(EngineContext(settings, model))
        self.sink = Output()
        self.length = tokens
        self.prefetched = 0
        self._number = 0
        self._random = random.Random(7)
        self._running = ""

    def name(self) -> str:
        self._number += 1
        return f"r{self._number}"

    def prompt(self, length: int) -> bytes:
        return array("I", [self._random.randrange(4000) for _ in range(length)]).tobytes()

    def submit(self, length: int, tokens: int, priority: int = 0) -> str:
        name = self.name()
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        work = Work(
            request=name,
            frontend="f",
            tokens=self.prompt(length),
            sampling=sampling,
            salt=1,
            priority=priority,
        )
        self.sink.ended[name] = asyncio.Event()
        self.engine.submit(work)
        return name

    def keep_prefetching(self, variant: str) -> None:
        """Start a prefetch unless one is running."""
        if variant == "whole":
            if not self._running or self.sink.ended[self._running].is_set():
                self._running = self.submit(self.length, 1, PREFETCH_PRIORITY)
        elif variant == "slices" and (not self._running or not self._is_prefetching()):
            self._running = self.name()
            tokens = self.prompt(self.length)
            command = Prefetch(
                id=self._running, tokens=tokens, salt=1, compute=self.length, deadline_s=600.0
            )
            reason = self.engine.prefetch(command)
            if reason:
                raise SystemExit(reason)

    def _is_prefetching(self) -> bool:
        return self._running in self.engine._prefetches._tasks

    async def end(self, variant: str) -> None:
        """End the prefetch that is running."""
        if self._running:
            self.engine.abort(self._running)
        self._running = ""
        await self.engine.drain()

    async def arrivals(self, variant: str) -> float:
        """Mean time to the token of requests that arrive at random."""
        seconds = 0.0
        for _ in range(ARRIVALS):
            self.keep_prefetching(variant)
            await asyncio.sleep(self._random.uniform(0.02, 0.08))
            start = time.perf_counter()
            name = self.submit(64, 1)
            await self.sink.ended[name].wait()
            seconds += time.perf_counter() - start
        await self.end(variant)
        return seconds / ARRIVALS

    async def decoding(self, variant: str) -> float:
        """Time in which requests decode together."""
        names = [self.submit(64, ANSWER) for _ in range(DECODING)]
        while any(self.sink.tokens.get(name, 0) < 5 for name in names):
            await asyncio.sleep(0.001)
        start = time.perf_counter()
        watching = asyncio.create_task(self._keep(variant))
        for name in names:
            await self.sink.ended[name].wait()
        seconds = time.perf_counter() - start
        watching.cancel()
        await self.end(variant)
        return seconds

    async def _keep(self, variant: str) -> None:
        while True:
            self.keep_prefetching(variant)
            await asyncio.sleep(0.005)


async def measure(model: Path, options: argparse.Namespace) -> None:
    """Run all rounds and print the table."""
    load = Load(model, options.tokens)
    await load.engine.start(load.sink)
    found: dict[tuple[str, str], list[float]] = {}
    for round_ in range(options.rounds + 1):
        for variant in VARIANTS:
            for name, run in (("arrivals", load.arrivals), ("decoding", load.decoding)):
                value = await run(variant)
                if round_:  # the first warms up
                    found.setdefault((variant, name), []).append(value)
    alone = await time_prefetch(load)
    await load.engine.close()
    print(f"{options.rounds} rounds; a prefetch of {options.tokens} tokens runs beside requests")
    print(f"{'ms (ratio)':10}{'arriving request':>24}{'decoding':>24}")
    for variant in VARIANTS:
        cells = ""
        for name in ("arrivals", "decoding"):
            values, base = found[variant, name], found["none", name]
            ratio = statistics.median(v / b for v, b in zip(values, base, strict=True))
            cells += f"{f'{1e3 * statistics.median(values):.1f} ({ratio:.2f})':>24}"
        print(f"{variant:10}{cells}")
    whole, slices = alone
    print(f"alone: {whole:.2f} s as one request, {slices:.2f} s in slices")


async def time_prefetch(load: Load) -> tuple[float, float]:
    """Seconds of a prefetch on an idle engine, as one request and in slices."""
    start = time.perf_counter()
    await load.sink.ended[load.submit(load.length, 1)].wait()
    whole = time.perf_counter() - start
    start = time.perf_counter()
    load.keep_prefetching("slices")
    while load._is_prefetching():
        await asyncio.sleep(0.002)
    return whole, time.perf_counter() - start


def main() -> None:
    """Create the model and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    from kvmesh.worker.models.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        make_tiny_model(model)
        asyncio.run(measure(model, options))


if __name__ == "__main__":
    main()
