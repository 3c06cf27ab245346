"""The index after recorded streams of the engines' own caches: what those caches found then."""

from collections import Counter
from pathlib import Path

import pytest
from support.event_streams.stream import Lookup, Message, Restart, read_stream, stream_files

from kvmesh.bus.messages import Cleared, KvEvent, Removed, Sampling, Work
from kvmesh.hashing import block_hashes
from kvmesh.index import TIERS, create_index
from kvmesh.worker.adapters.kv_events.decoder import EventDecoder
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.salts import PromptSalts


class Replay:
    """The adapter of one rank, and the index that its events make."""

    def __init__(self, path: Path) -> None:
        self.stream = stream = read_stream(path)
        salts = PromptSalts(stream.model, stream.block_size)
        if stream.tenants:
            salts.cache_salt(
                Work(
                    request="r",
                    frontend="f",
                    tokens=b"",
                    sampling=Sampling(max_tokens=1),
                    salt=1,
                    tenant="t",
                )
            )
        self.decoder = EventDecoder()
        self.ledger = CacheLedger(stream.block_size, salts.root_salt, stream.counted)
        self.index = create_index()

    def run(self) -> Counter[str]:
        """Take all steps; returns look-ups by how the index differs from the engine."""
        found: Counter[str] = Counter()
        for step in self.stream.steps:
            if isinstance(step, Message):
                self._apply(self.ledger.apply(self.decoder.decode(step.payload)))
            elif isinstance(step, Restart):
                self._apply(self.ledger.clear())
            else:
                found[self._compare(step)] += 1
        return found

    def tokens(self, prompt: bytes, salt: int) -> list[int]:
        """Leading tokens of a prompt by the tier in which the index has them."""
        found = self.index.find(block_hashes(prompt, self.stream.block_size, salt)[1])
        row = memoryview(found).cast("I").tolist()[1:] if found else [0] * TIERS
        return [self.stream.block_size * blocks for blocks in row]

    def rebuild(self) -> None:
        """Make the index anew, from a dump."""
        self.index = create_index()
        self._apply(self.ledger.dump())

    def _compare(self, step: Lookup) -> str:
        ours = self.tokens(self.stream.prompts[step.prompt], step.salt)
        if ours == step.tiers:
            return "equal"
        more = sum(ours) - sum(step.tiers)
        if more == self.stream.block_size:
            return "one block more"
        return f"more" if more > 0 else "less" if more < 0 else "another tier"

    def _apply(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.index.clear(0, event.tier)
            elif isinstance(event, Removed):
                self.index.remove(0, event.tier, event.engine)
            elif event.previous is not None:
                self.index.attach(0, event.tier, event.previous, event.engine, event.local)
            else:
                assert self.index.store(
                    0, event.tier, event.parent, event.engine, event.local, event.salt
                )


ALLOWED = {
    "exact": set(),
    "draft": {"one block more"},
    "less": {"less"},
    "more": {"one block more", "more"},
}


@pytest.mark.parametrize("path", stream_files(), ids=lambda path: path.stem)
def test_the_index_has_what_the_engine_finds(path: Path) -> None:
    replay = Replay(path)
    stream, found = replay.stream, replay.run()
    assert found["equal"] >= 5
    assert {*found} - {"equal"} == ALLOWED[stream.answers], found
    counts = replay.ledger.counts(0, 0, "")
    assert sorted(counts.dropped) == stream.dropped
    assert bool(counts.unplaced) == stream.waiting
    assert stream.answers != "less" or stream.dropped or stream.waiting
