"""Times of one engine beside a block manager: cold, warm, loaded, and beside streams.

The engine is torch's or vLLM's, driven as a worker drives it. A prompt is computed, repeated with
the engine's own cache, and repeated from the host's memory; the latter also while other requests
decode, whose tokens per second are compared with those before.
"""

import asyncio
import random
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common import Report, median
from kv_node import LIMITS, NODE, Node, until

from kvmesh.blocks.attachment import ArenaUser, WorkerIdentity
from kvmesh.blocks.kvbm_client import KvbmClient
from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Clear, KvEvent, KvLayout, Sampling, Work
from kvmesh.settings import Settings
from kvmesh.settings.schema import NatsSettings, TorchSettings, VllmSettings, WorkerSettings
from kvmesh.worker.engine import EngineContext, EngineError, OutputDelta, create_engine

Kind = Literal["torch", "vllm"]
TRIES = 20
WAIT_S = 600.0


@dataclass(frozen=True)
class Scale:
    """Sizes: a prompt of `prefix` tokens, `streams` decoding requests, `window` tokens of each.

    `eager`: vLLM runs without compilation and CUDA graphs.
    """

    prefix: int
    block: int = 16
    streams: int = 4
    window: int = 16
    rounds: int = 3
    eager: bool = False


@dataclass
class Arrivals:
    """The engine's sink: times of the tokens of each request, and its cached tokens by tier."""

    times: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    error: EngineError | None = None

    def output(self, deltas: Sequence[OutputDelta]) -> None:
        for delta in deltas:
            now = time.perf_counter()
            self.times.setdefault(delta.request, []).extend([now] * len(delta.tokens))
            if delta.cached is not None:
                self.cached[delta.request] = delta.cached
            if delta.finish:
                self.ended.add(delta.request)

    def events(self, rank: int, events: Sequence[KvEvent]) -> None:
        pass

    def events_lost(self, rank: int, count: int) -> None:
        pass

    def failed(self, error: EngineError) -> None:
        self.error = error


class MeasuredEngine:
    """An engine beside the kvbm of a node."""

    def __init__(self, kind: Kind, model: Path, device: str, scale: Scale, url: str, bus: Bus):
        def connect(layout: KvLayout, user: ArenaUser) -> KvbmClient:
            worker = WorkerIdentity(node=NODE, instance=kind, model="bench", layout=layout)
            return KvbmClient(bus, LIMITS, worker, user)

        blocks = 4 * scale.prefix // scale.block + 64 * scale.streams
        on_gpu = device != "cpu"
        settings = Settings(
            nats=NatsSettings(url=url),
            worker=WorkerSettings(
                engine=kind, block_size=scale.block, node=NODE, served_name="bench"
            ),
            torch=TorchSettings(
                device=device,
                blocks=blocks,
                max_batched_tokens=2048 if on_gpu else 512,
                pass_tokens=512 if on_gpu else 32,
            ),
            vllm=VllmSettings(args=_vllm_arguments(blocks, scale, on_gpu), kvbm=True),
        )
        self.scale = scale
        self.sink = Arrivals()
        self._engine: Any = create_engine(EngineContext(settings, model, connect))
        self._random = random.Random(7)
        self._number = 0

    async def start(self) -> None:
        await self._engine.start(self.sink)

    async def close(self) -> None:
        await self._engine.close()

    def prompt(self) -> bytes:
        """A prompt that the engine has not seen."""
        count = self.scale.prefix + self.scale.block // 2
        return array("I", [self._random.randrange(4000) for _ in range(count)]).tobytes()

    def submit(self, tokens: bytes, count: int) -> str:
        self._number += 1
        name = f"r{self._number}"
        sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
        self._engine.submit(
            Work(request=name, frontend="f", tokens=tokens, sampling=sampling, salt=1)
        )
        return name

    async def ttft(self, tokens: bytes) -> tuple[float, list[int]]:
        """Seconds to the first token, and the cached tokens by tier."""
        start = time.perf_counter()
        name = self.submit(tokens, 1)
        await self._until(lambda: name in self.sink.ended)
        return self.sink.times[name][0] - start, self.sink.cached.get(name, [])

    async def clear(self) -> None:
        """Empty the engine's own cache, but not the host's memory."""
        await asyncio.wait_for(self._engine.drain(), WAIT_S)
        await self._engine.clear(Clear())
        await self.ttft(self.prompt()[: 4 * self.scale.block // 2])

    def is_loaded(self, cached: list[int]) -> bool:
        return sum(cached[1:]) >= self.scale.prefix - self.scale.block

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[list[str]]:
        """Requests that decode until the end of this context."""
        short = self.prompt()[: 4 * self.scale.block]
        names = [self.submit(short, 24 * self.scale.block) for _ in range(self.scale.streams)]
        try:
            for name in names:
                await self._until(lambda name=name: name in self.sink.times)
            yield names
        finally:
            for name in names:
                self._engine.abort(name)

    async def decoded(self, names: list[str], count: int) -> float:
        """Tokens per second of all these requests, until each has `count` more."""
        start, before = time.perf_counter(), self._tokens(names)
        wanted = [len(self.sink.times[name]) + count for name in names]
        pairs = list(zip(names, wanted, strict=True))
        await self._until(
            lambda: all(n in self.sink.ended or len(self.sink.times[n]) >= w for n, w in pairs)
        )
        return (self._tokens(names) - before) / (time.perf_counter() - start)

    async def beside(self, names: list[str], tokens: bytes) -> tuple[float, list[int], float]:
        """`ttft` beside streams, and their tokens per second meanwhile."""
        before = self._tokens(names)
        seconds, cached = await self.ttft(tokens)
        return seconds, cached, (self._tokens(names) - before) / seconds

    def _tokens(self, names: list[str]) -> int:
        return sum(len(self.sink.times[name]) for name in names)

    async def _until(self, check: Any) -> None:
        await until(lambda: check() or self.sink.error, WAIT_S)
        if self.sink.error is not None:
            raise self.sink.error


def _vllm_arguments(blocks: int, scale: Scale, on_gpu: bool) -> list[str]:
    arguments = [
        f"num_gpu_blocks_override={blocks}",
        f"max_model_len={scale.prefix + 64 * scale.block}",
    ]
    if on_gpu:
        return [*arguments, "enforce_eager=true"] if scale.eager else arguments
    return [*arguments, "enforce_eager=true", "dtype=float32"]


async def measure_engine(
    report: Report, kind: Kind, model: Path, device: str, scale: Scale, running: Node
) -> str:
    """Add the figures of one engine; returns them in words."""
    bus = await running.connect("bench")
    engine = MeasuredEngine(kind, model, device, scale, running.url, bus)
    await engine.start()
    try:
        computed, warm = await _computed(report, engine, kind)
        loaded = await _loaded(report, engine, kind, computed)
        if loaded is None:
            return f"{kind}: warm ÷ {computed / warm:.1f}, nothing loaded (computing is faster)"
        kept = await _beside_streams(report, engine, kind, loaded)
        words = f"{kind}: TTFT ÷ {computed / warm:.1f} warm, ÷ {computed / loaded:.1f} loaded"
        if kept is None:
            return f"{words}, nothing loaded beside streams (computing is faster)"
        return f"{words}, streams keep {kept:.0%} beside a load"
    finally:
        await engine.close()
        await bus.close()


async def _computed(report: Report, engine: MeasuredEngine, kind: Kind) -> tuple[float, float]:
    """TTFT of new prompts, and of the same with the engine's own cache."""
    await engine.ttft(engine.prompt())  # compiles and allocates
    cold, warm = [], []
    for _ in range(engine.scale.rounds):
        tokens = engine.prompt()
        cold.append((await engine.ttft(tokens))[0])
        warm.append((await engine.ttft(tokens))[0])
    title = f"{kind}: TTFT of {engine.scale.prefix} tokens"
    report.add_runs(f"{title}, computed", cold, "s")
    report.add_runs(f"{title}, engine's cache", warm, "s", f"{median(cold):.3g}")
    return median(cold), median(warm)


async def _loaded(
    report: Report, engine: MeasuredEngine, kind: Kind, computed: float
) -> float | None:
    """TTFT of prompts from the host's memory; None if the block manager prefers computing."""
    found: list[float] = []
    tokens = engine.prompt()
    for _ in range(TRIES):
        await engine.clear()
        seconds, cached = await engine.ttft(tokens)  # what is computed is written, for later
        if engine.is_loaded(cached):
            found.append(seconds)
        if len(found) == engine.scale.rounds:
            break
        await asyncio.sleep(0.2)
    if not found:
        return None
    prefix = engine.scale.prefix
    title = f"{kind}: TTFT of {prefix} tokens, loaded from the host"
    report.add_runs(title, found, "s", f"{computed:.3g}")
    rates = [prefix / seconds for seconds in found]
    report.add_runs(f"{kind}: tokens loaded", rates, "1/s", f"{prefix / computed:.4g}")
    return median(found)


async def _beside_streams(
    report: Report, engine: MeasuredEngine, kind: Kind, loaded: float
) -> float | None:
    """A load beside streams; returns the share of their tokens per second that they keep.

    None if the block manager prefers computing.
    """
    times: list[float] = []
    alone: dict[str, list[float]] = {"loading": [], "computing": []}
    meanwhile: dict[str, list[float]] = {"loading": [], "computing": []}
    tokens = engine.prompt()
    for _ in range(TRIES):
        await engine.clear()
        async with engine.streams() as names:
            before = await engine.decoded(names, engine.scale.window)
            seconds, cached, rate = await engine.beside(names, tokens)
        what = "loading" if engine.is_loaded(cached) else "computing"
        meanwhile[what].append(rate)
        alone[what].append(before)
        if what == "loading":
            times.append(seconds)
        if len(times) == engine.scale.rounds:
            break
        await asyncio.sleep(0.2)
    count = engine.scale.streams
    if times:
        title = f"{kind}: TTFT loaded beside {count} streams"
        report.add_runs(title, times, "s", f"{loaded:.3g}")
    for what, rates in meanwhile.items():
        if rates:
            title = f"{kind}: tokens/s of {count} streams beside {what} a prompt"
            report.add_runs(title, rates, "1/s", f"{median(alone[what]):.4g}")
    return median(meanwhile["loading"]) / median(alone["loading"]) if times else None
