"""A started vLLM of 64 blocks of 32 tokens (512 tokens of context) for tests."""

from array import array
from pathlib import Path

from msgspec.structs import replace

from kvmesh.bus.messages import Work
from kvmesh.hashing import salt
from kvmesh.settings import Settings
from kvmesh.settings.schema import VllmSettings, WorkerSettings
from kvmesh.weights.answer import WeightsAccess
from kvmesh.worker.engine import Engine, EngineContext, EngineInfo, create_engine
from support import engines
from support.engines import StartedEngine, prompt
from support.recorder import Recorder
from support.wait import eventually

__all__ = ["ARGS", "PLAIN", "SIZE", "VllmRun", "prompt", "sequence", "work"]
SIZE = 32
PLAIN = salt("tiny")
ARGS = [
    "enforce_eager=true",
    "num_gpu_blocks_override=64",
    "max_model_len=512",
    "max_num_seqs=4",
    "dtype=float32",
]


def work(name: str, tokens: bytes, max_tokens: int = 12, **fields: object) -> Work:
    return engines.work(name, tokens, max_tokens, **{"salt": PLAIN, **fields})


def sequence(tokens: bytes, seed: int = PLAIN) -> list[int]:
    return engines.sequence(tokens, seed, SIZE)


class VllmRun(StartedEngine):
    """A vLLM and a record of its output."""

    def __init__(self, engine: Engine, info: EngineInfo, sink: Recorder) -> None:
        super().__init__(engine, info, sink, salt=PLAIN)
        self.markers = 0

    @classmethod
    async def start(
        cls,
        model: Path,
        *more: str,
        vllm: VllmSettings | None = None,
        max_adapters: int = 0,
        weights: WeightsAccess | None = None,
    ) -> "VllmRun":
        """Start vLLM with additional arguments; raises EngineError."""
        vllm = replace(vllm or VllmSettings(), args=[*ARGS, *more])
        worker = WorkerSettings(engine="vllm", block_size=SIZE, max_adapters=max_adapters)
        settings = Settings(vllm=vllm, worker=worker)
        context = EngineContext(settings, model, weights=weights)
        engine, sink = create_engine(context), Recorder()
        return cls(engine, await engine.start(sink), sink)

    async def run_works(self, *items: Work) -> None:
        """Submit requests and wait for their ends."""
        for item in items:
            self.engine.submit(item)
        await self.ended(*(item.request for item in items))

    async def wait_for_events(self) -> None:
        """Wait until all events so far have been received, by the event of a marker prompt."""
        self.markers += 1
        tokens = array("I", [4000 + self.markers] * (SIZE + 1)).tobytes()
        await self.run_works(work(f"marker{self.markers}", tokens, max_tokens=1))
        await eventually(lambda: sequence(tokens)[0] in self.held_hashes, what="the marker's event")
