"""A torch engine beside a kvbm, for measurements of the time to a prompt's first token."""

import time
from array import array
from pathlib import Path

from kv_node import LIMITS, NODE, until

from kvmesh.blocks.attachment import ArenaUser, WorkerIdentity
from kvmesh.blocks.kvbm_client import KvbmClient
from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Clear, KvEvent, KvLayout, Sampling, Work
from kvmesh.settings.schema import Settings, TorchSettings
from kvmesh.worker.engine import EngineContext, EngineError, OutputDelta
from kvmesh.worker.engines.torch.engine import TorchEngine

PREFIX_TOKENS = 4096
BLOCK = 16


class Clock:
    """An engine's sink that records the time of each request's first token."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.cached: dict[str, list[int]] = {}

    def output(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            self.first.setdefault(delta.request, time.perf_counter())
            if delta.cached is not None:
                self.cached[delta.request] = delta.cached

    def events(self, rank: int, events: list[KvEvent]) -> None:
        pass

    def events_lost(self, rank: int, count: int) -> None:
        pass

    def failed(self, error: EngineError) -> None:
        raise error


class Engine:
    """A torch engine that serves one request at a time."""

    def __init__(self, bus: Bus, folder: Path, name: str) -> None:
        def connect(layout: KvLayout, user: ArenaUser) -> KvbmClient:
            tenant = WorkerIdentity(node=NODE, instance=name, model="bench", layout=layout)
            self.client = KvbmClient(bus, LIMITS, tenant, user)
            return self.client

        options = TorchSettings(blocks=2 * PREFIX_TOKENS // BLOCK, max_batched_tokens=1024)
        self._engine = TorchEngine(EngineContext(Settings(torch=options), folder, connect))
        self._clock = Clock()

    async def start(self) -> None:
        await self._engine.start(self._clock)
        await until(lambda: self.client.key is not None)

    async def ttft(self, name: str, tenant: str) -> float:
        """Seconds to the first token of a prompt of PREFIX_TOKENS that all requests share."""
        await self._engine.clear(Clear())
        tokens = array("I", [i * 37 % 8000 for i in range(PREFIX_TOKENS + 8)]).tobytes()
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        work = Work(
            request=name,
            frontend="f",
            tokens=tokens,
            sampling=sampling,
            tenant=tenant,
            salt=len(tenant),
        )
        start = time.perf_counter()
        self._engine.submit(work)
        await until(lambda: name in self._clock.first)
        return self._clock.first[name] - start

    def loaded(self, name: str) -> int:
        return sum(self._clock.cached[name][1:])

    async def written(self) -> None:
        lower_tiers = self._engine._lower_tiers
        assert lower_tiers is not None
        await until(lambda: lower_tiers.writer.idle)

    async def close(self) -> None:
        await self._engine.close()


def make_model(folder: Path) -> None:
    """A Llama of 30 M parameters with random weights: 16 KiB of KV per token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvmesh.worker.models.tiny_model import make_tiny_model

    make_tiny_model(folder)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=64,
        num_key_value_heads=4,
        max_position_embeddings=2 * PREFIX_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=[8184, 8182],
        pad_token_id=8182,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
