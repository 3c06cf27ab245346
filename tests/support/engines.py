"""A started engine with a recorder as its sink, created by one factory per engine."""

from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from kvmesh.bus.messages import ControlReply, Load, Prefetch, Sampling, Work
from kvmesh.demo import model_dir
from kvmesh.hashing import block_hashes
from kvmesh.settings import Settings
from kvmesh.settings.schema import MockSettings, TorchSettings, WorkerSettings
from kvmesh.worker.capabilities import EngineCommand, execute_command
from kvmesh.worker.engine import Engine, EngineContext, EngineInfo, create_engine
from support.recorder import Recorder
from support.tiny import tiny_model
from support.wait import eventually

SALT = 77
STEP = 13  # between the ids of a prompt's tokens


@dataclass
class StartedEngine:
    """A started engine of 64 blocks and 512 tokens of context, and its recorder.

    `earlier` are the outcomes of directives before the test.
    """

    engine: Engine
    info: EngineInfo
    sink: Recorder
    salt: int = SALT
    earlier: dict[str, int] = field(default_factory=dict)
    step: int = STEP

    @property
    def size(self) -> int:
        return self.info.block_size

    @property
    def held_hashes(self) -> set[int]:
        """Sequence hashes of the blocks that the engine holds according to its events."""
        return self.sink.sequences

    def prompt(self, blocks: float, first: int = 0) -> bytes:
        """A prompt of this test, which shares no block with those of another `step`."""
        return prompt(int(blocks * self.size), first, self.step)

    def sequence(self, tokens: bytes, salt: int | None = None) -> list[int]:
        """The sequence hashes of a prompt's full blocks."""
        return sequence(tokens, self.salt if salt is None else salt, self.size)

    def depth(self, tokens: bytes) -> int:
        """Leading tokens of a prompt that the engine could reuse according to its events."""
        hashes, held = self.sequence(tokens), self.held_hashes
        count = next((i for i, hash_ in enumerate(hashes) if hash_ not in held), len(hashes))
        return min(count, (len(tokens) // 4 - 1) // self.size) * self.size

    def submit(self, name: str, tokens: bytes, max_tokens: int = 12, **fields: object) -> None:
        self.engine.submit(work(name, tokens, max_tokens, **{"salt": self.salt, **fields}))

    async def run(self, name: str, tokens: bytes, max_tokens: int = 12, **fields: object) -> None:
        self.submit(name, tokens, max_tokens, **fields)
        await self.ended(name)

    async def execute(self, command: EngineCommand) -> ControlReply:
        return await execute_command(self.engine, "e", command)

    async def ended(self, *names: str) -> None:
        def over() -> bool:
            assert not self.sink.errors
            return all(self.sink.finish(name) for name in names)

        await eventually(over, what=f"end of {names}")

    async def wait_for_tokens(self, name: str) -> None:
        await eventually(lambda: self.sink.tokens(name), what=f"tokens of {name}")

    async def wait_for_events(self) -> None:
        """Wait until every event so far has been received."""

    def load(self) -> Load:
        return self.engine.load("i")[0]


Factory = Callable[[], Awaitable[StartedEngine]]


async def start_mock(**options: object) -> StartedEngine:
    mock = replace(
        MockSettings(blocks=64, max_sequences=4, max_batched_tokens=256, speedup=20), **options
    )
    settings = Settings(mock=mock, worker=WorkerSettings(block_size=16, context=512))
    engine, sink = create_engine(EngineContext(settings, model_dir())), Recorder()
    return StartedEngine(engine, await engine.start(sink), sink)


async def start_torch() -> StartedEngine:
    torch = TorchSettings(blocks=64, max_sequences=4, max_batched_tokens=256, threads=1)
    worker = WorkerSettings(engine="torch", block_size=16, context=512)
    context = EngineContext(Settings(torch=torch, worker=worker), tiny_model())
    engine, sink = create_engine(context), Recorder()
    return StartedEngine(engine, await engine.start(sink), sink)


async def start_mock_tiers() -> StartedEngine:
    return await start_mock(host_blocks=96, disk_blocks=256)


FACTORIES: dict[str, Factory] = {
    "mock": start_mock,
    "mock with tiers": start_mock_tiers,
    "torch": start_torch,
}
ENGINES = sorted(FACTORIES)


@asynccontextmanager
async def running(name: str) -> AsyncIterator[StartedEngine]:
    """The engine of that name, closed at the end; skips the test if it is not installed."""
    if name == "torch":
        pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")
    made = await FACTORIES[name]()
    yield made
    await made.engine.close()


def prompt(length: int, first: int = 0, step: int = STEP) -> bytes:
    return array("I", [(first + step * i) % 4000 for i in range(length)]).tobytes()


def work(name: str, tokens: bytes, max_tokens: int = 12, **fields: object) -> Work:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    base = Work(request=name, frontend="f", tokens=tokens, sampling=sampling, salt=SALT)
    return replace(base, **fields)


def sequence(tokens: bytes, salt: int = SALT, size: int = 16) -> list[int]:
    """The sequence hashes of a prompt's full blocks."""
    return list(array("Q", block_hashes(tokens, size, salt)[1]))


def make_prefetch(tokens: bytes, name: str = "p", **fields: object) -> Prefetch:
    return replace(Prefetch(id=name, tokens=tokens, salt=SALT), **fields)
