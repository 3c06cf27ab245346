"""A torch core driven step by step, with a record of its output."""

import itertools
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace

from kvmesh.bus.messages import Cleared, KvEvent, KvLayout, Removed, Sampling, Work
from kvmesh.hashing import block_hashes
from kvmesh.worker.engine import OutputDelta
from kvmesh.worker.enginecore.retention_options import RetentionOptions
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.torch.blocks import block_io as block_io
from kvmesh.worker.engines.torch.core import TorchCore
from kvmesh.worker.engines.torch.model.loading import load_model
from kvmesh.worker.engines.torch.model.paged_model import PagedModel
from kvmesh.worker.engines.torch.model.sampling import Sampler

BLOCK = 16
SALT = 77
PASS_TOKENS = 32


def load(folder: Path, block_size: int = BLOCK) -> PagedModel:
    torch.set_num_threads(1)
    return PagedModel(load_model(folder, "auto", "cpu"), block_size, PASS_TOKENS)


def make_core(model: PagedModel, blocks: int = 64, budget: int = 256, batch: int = 8) -> TorchCore:
    """A core with its own pool."""
    model.allocate(blocks)
    limits = SchedulerLimits(
        block_size=BLOCK, max_sequences=batch, max_batched_tokens=budget, watermark=0.0
    )
    return TorchCore(model, limits, blocks, blocks * BLOCK, RetentionOptions())


def make_work(name: str, tokens: list[int], max_tokens: int = 12, **sampling: object) -> Work:
    """Work with greedy sampling and two top log probabilities, by default."""
    base = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    return Work(
        request=name,
        frontend="f",
        tokens=array("I", tokens).tobytes(),
        sampling=replace(base, **sampling),
        salt=SALT,
    )


def hashes(tokens: list[int]) -> tuple[bytes, bytes]:
    """Local and sequence hashes of the full blocks."""
    return block_hashes(array("I", tokens).tobytes(), BLOCK, SALT)


class CopiedBlocks(NamedTuple):
    """Blocks outside an engine."""

    layout: KvLayout
    sequence: "array[int]"
    local: "array[int]"
    tokens: list[int]
    data: list[bytes]


@dataclass
class Driver:
    """Runs a core and records its output; `held` are the blocks held according to the events."""

    core: TorchCore
    deltas: dict[str, list[OutputDelta]] = field(default_factory=dict)
    events: list[KvEvent] = field(default_factory=list)
    held: set[int] = field(default_factory=set)

    def submit(self, work: Work) -> None:
        model = self.core.model
        tokens = array("I", work.tokens).tolist()
        sampler = Sampler(work.sampling, tokens, [], model.stop_tokens, seed=5)
        self.core.submit(work, sampler)
        self.deltas[work.request] = []

    def step(self) -> None:
        step, events = self.core.plan(0.0)
        self.record(events)
        if step.entries:
            self.core.run(step)
            deltas, events = self.core.commit(step, 0.0)
            self.record(events)
            for delta in deltas:
                self.deltas[delta.request].append(delta)

    def run(self, *works: Work) -> None:
        """Submit works and step until the core is idle."""
        for work in works:
            self.submit(work)
        for _ in range(5000):
            if not self.core.busy:
                return
            self.step()
        raise AssertionError("the core does not become idle")

    def answer(self, name: str) -> list[tuple[int, dict[int, float]]]:
        """(token, log probabilities) of each output token, bit-exact."""
        deltas = self.deltas[name]
        tokens = itertools.chain.from_iterable(delta.tokens for delta in deltas)
        rows = itertools.chain.from_iterable(delta.logprobs or [] for delta in deltas)
        return list(zip(tokens, rows, strict=True))

    def cached(self, name: str) -> int:
        return sum(self.deltas[name][0].cached or [])

    def record(self, events: list[KvEvent]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, Cleared):
                self.held.clear()
            elif isinstance(event, Removed):
                gone = set(array("Q", event.engine))
                assert gone <= self.held
                self.held -= gone
            else:
                new = set(array("Q", event.engine))
                assert not new & self.held
                self.held |= new

    def copy_out(self, tokens: list[int]) -> "CopiedBlocks":
        """Copy the blocks held of a prompt."""
        local, sequence = (array("Q", packed) for packed in hashes(tokens))
        fingerprints = self.fingerprints(tokens)
        held, block_ids = block_io.lock_held_prefix(self.core, sequence, fingerprints)
        data = self.core.model.pool.save(block_ids)
        self.core.blocks.unlock(held)
        return CopiedBlocks(self.core.model.layout, held, local[: len(held)], tokens, data)

    def copy_in(self, copied: "CopiedBlocks") -> int:
        """Store copied blocks that are not held; returns how many of them are held then."""
        block_io.check_layout(self.core, copied.layout)
        self.core.physical_blocks.release_idle()
        fingerprints = self.fingerprints(copied.tokens)
        prefix = block_io.HeldPrefix(
            self.core, copied.sequence, copied.local, fingerprints, SALT, "", self.take_events
        )
        block_ids = prefix.reserve(len(copied.data) - prefix.held)
        data = copied.data[prefix.held : prefix.held + len(block_ids)]
        self.core.model.pool.load(block_ids, data)
        prefix.commit(block_ids, len(block_ids))
        prefix.release()
        self.take_events()
        return prefix.held

    def fingerprints(self, tokens: list[int]) -> bytes:
        fingerprints = self.core.guard.fingerprints(make_work("", tokens))
        return fingerprints.upto(array("I", tokens), len(tokens) // BLOCK)

    def take_events(self) -> None:
        self.record(self.core.take_events())
