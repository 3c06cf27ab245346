"""Torch engines on a node with a block manager, driven directly, with a record of their output."""

from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvmesh.blocks.attachment import ArenaUser, WorkerIdentity
from kvmesh.blocks.kvbm_client import KvbmClient
from kvmesh.bus.client import Bus
from kvmesh.bus.messages import KvEvent, KvLayout, Sampling, Work
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.settings import Settings
from kvmesh.settings.schema import TorchSettings, WorkerSettings
from kvmesh.worker.engine import EngineContext, EngineError, OutputDelta
from support.tiny import tiny_model
from support.wait import eventually

if TYPE_CHECKING:  # transformers, which every process of the mesh tests would import
    from kvmesh.worker.engines.torch.blocks.lower_tiers import LowerTiers

SALT = 5
BLOCK = 16


def make_work(
    name: str, tokens: list[int], max_tokens: int = 8, salt: int = SALT, tenant: str = ""
) -> Work:
    """Work with greedy sampling and two top log probabilities."""
    return Work(
        request=name,
        frontend="f",
        tokens=array("I", tokens).tobytes(),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=2),
        salt=salt,
        tenant=tenant,
    )


@dataclass
class SinkRecorder:
    """A sink that records output and failures."""

    deltas: dict[str, list[OutputDelta]] = field(default_factory=dict)
    failures: list[EngineError] = field(default_factory=list)

    def output(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            self.deltas.setdefault(delta.request, []).append(delta)

    def events(self, rank: int, events: list[KvEvent]) -> None:
        pass

    def events_lost(self, rank: int, count: int) -> None:
        pass

    def failed(self, error: EngineError) -> None:
        self.failures.append(error)


Answer = list[tuple[int, dict[int, float]]]


class Host:
    """One worker's engine."""

    def __init__(
        self,
        bus: Bus,
        limits: StreamLimits,
        name: str,
        blocks: int = 256,
        node: str = "here",
        queue: int = 4096,
    ) -> None:
        from kvmesh.worker.engines.torch.engine import TorchEngine

        def connect(layout: KvLayout, user: ArenaUser) -> KvbmClient:
            tenant = WorkerIdentity(node=node, instance=name, model="tiny", layout=layout)
            self.client = KvbmClient(bus, limits, tenant, user)
            return self.client

        settings = Settings(
            torch=TorchSettings(blocks=blocks, threads=1, pass_tokens=32),
            worker=WorkerSettings(write_through_blocks=queue),
        )
        self.engine = TorchEngine(EngineContext(settings, tiny_model(), connect))
        self.sink = SinkRecorder()

    async def start(self, attach: bool = True) -> None:
        await self.engine.start(self.sink)
        if attach:
            await self.attached()

    async def attached(self, times: int = 1) -> None:
        await eventually(
            lambda: self.client.key is not None and self.client.attachments >= times,
            what="the engine attaches",
        )

    @property
    def lower_tiers(self) -> "LowerTiers":
        assert self.engine._lower_tiers is not None
        return self.engine._lower_tiers

    async def run(self, *works: Work) -> None:
        """Submit works together and wait for their ends."""
        for work in works:
            self.engine.submit(work)
        for work in works:
            await eventually(partial(self.ended, work.request), what=work.request)

    async def written(self) -> None:
        await eventually(lambda: self.lower_tiers.writer.idle, what="all blocks are written")

    def ended(self, name: str) -> str | None:
        assert not self.sink.failures
        return next((d.finish for d in self.sink.deltas.get(name, []) if d.finish), None)

    def answer(self, name: str) -> Answer:
        """(token, log probabilities) of each output token, bit-exact."""
        deltas = self.sink.deltas[name]
        return [
            (token, row)
            for delta in deltas
            for token, row in zip(delta.tokens, delta.logprobs or [], strict=True)
        ]

    def cached(self, name: str) -> list[int]:
        return next(d.cached for d in self.sink.deltas[name] if d.cached is not None)

    async def check_accounting(self) -> None:
        """Wait until no block is referenced and every block is accounted for."""
        core = self.engine._core
        await eventually(lambda: core.blocks.active == 0, what="all blocks are freed")
        assert core.physical_blocks.contents == core.blocks.contents
        assert (
            core.physical_blocks.free + len(core.physical_blocks.contents) == core.blocks.capacity
        )
