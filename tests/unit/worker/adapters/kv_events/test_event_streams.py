"""The index after recorded streams of the engines' own caches: what those caches found then.

`tests/data/events/README.md` says how the streams are made.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.event_streams.stream import (
    FOLDER,
    Lookup,
    Message,
    Restart,
    Stream,
    read_stream,
    stream_files,
)
from support.index_events import apply_to_index
from support.recorder import Recorder
from support.wait import eventually
from support.zmq_publisher import ZmqPublisher

from kvmesh.bus.messages import KvEvent, Sampling, Work
from kvmesh.hashing import block_hashes
from kvmesh.index import TIERS, create_index
from kvmesh.worker.adapters.kv_events.cache_events import CacheEvent
from kvmesh.worker.adapters.kv_events.decoder import EventDecoder
from kvmesh.worker.adapters.kv_events.feed import EventFeed
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.salts import PromptSalts
from kvmesh.worker.engines.trtllm.events import EventReader

# How the index may differ from the engine in a mode, and by what name the adapter says so; None:
# docs/engines.md alone does, as no event shows it. All other streams have no difference at all.
DRAFT = {"one block more", "nearer"}
MORE = {"one block more", "more"}
LIMITS: dict[str, tuple[set[str], str | None]] = {
    "lmcache-in-process": (MORE | {"less"}, "unplaced"),
    "lmcache-multi-process": (MORE, None),
    "sglang-draft": (DRAFT, "draft"),
    "sglang-draft-pages-of-one": (DRAFT, "draft"),
    "sglang-draft-radix-cache": (DRAFT, "draft"),
    "sglang-draft-tenants": (DRAFT, "draft"),
    "sglang-hicache-draft": (DRAFT, "draft"),
    "sglang-hicache-mixed-draft": (DRAFT, "draft"),
    "sglang-extra-keys": (MORE | {"less"}, None),
    "sglang-hybrid-windows": (MORE, None),
    "sglang-hybrid-windows-hicache": ({"nearer"}, None),
    "vllm-draft": (DRAFT, None),
    "vllm-draft-lookahead": (DRAFT, "draft"),
    "vllm-draft-lookahead-images": (DRAFT, "draft"),
    "vllm-draft-lookahead-tenants": (DRAFT, "draft"),
    "vllm-full-report": (MORE, None),
    "vllm-hybrid": (MORE, "windows"),
    "vllm-hybrid-states": (MORE, "windows"),
    "vllm-hybrid-states-parts": (MORE, "part_of_block"),
    "vllm-hybrid-windows-first": (MORE, "windows"),
    "vllm-windows-alone": ({"less"}, "windows"),
    "vllm-chunks-alone": ({"less"}, "windows"),
    "vllm-offloading-chunks": (MORE, None),
    "vllm-offloading-described-chunks": (MORE, None),
    "vllm-offloading-reset": ({"less"}, "reset"),
    "vllm-offloading-described-reset": ({"less"}, "reset"),
    "vllm-disk-restarts": ({"less", "further"}, "reset"),
    "vllm-simple-offloading-disk": ({"less"}, "reset"),
}


class Replay(Recorder):
    """The adapter of one rank, and the index that its events make."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
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
        self.reader = EventReader(stream.block_size)
        self.ledger = CacheLedger(stream.block_size, salts.root_salt, stream.counted)
        self.index = create_index()

    def run(self) -> Counter[str]:
        """Take all steps; returns look-ups by how the index differs from the engine."""
        found: Counter[str] = Counter()
        for step in self.stream.steps:
            if isinstance(step, Message):
                self._apply(self.ledger.apply(self._decoded(step.payload)))
            elif isinstance(step, Restart):
                self._apply(self.ledger.clear())
            else:
                found[self._compare(step)] += 1
        return found

    def _decoded(self, payload: bytes) -> list[CacheEvent]:
        if self.stream.engine == "tensorrt_llm":
            return self.reader.read(msgspec.json.decode(payload))[1]
        return self.decoder.decode(payload)

    def last_lookups(self) -> list[list[int]]:
        """Tokens in the index now of the prompts that were looked up at the end."""
        last = [step for step in self.stream.steps if isinstance(step, Lookup)][-20:]
        return [self._tokens(step) for step in last]

    def agrees(self, step: Lookup) -> bool:
        return self._compare(step) == "equal"

    def events(self, rank: int, events: list[KvEvent]) -> None:
        """As the sink of a feed."""
        self._apply(events)

    def rebuild(self) -> None:
        """Make the index anew, from a dump."""
        self.index = create_index()
        self._apply(self.ledger.dump())

    def names(self) -> set[str]:
        """Names under which the adapter tells of events that the index cannot have."""
        counts = self.ledger.counts(0, 0, "")
        waiting = {"unplaced"} if counts.unplaced else set[str]()
        return {*counts.dropped, *self.decoder.limits, *waiting}

    def _tokens(self, step: Lookup) -> list[int]:
        """Leading tokens of a prompt by the tier in which the index has them."""
        size = self.stream.block_size
        found = self.index.find(block_hashes(self.stream.prompts[step.prompt], size, step.salt)[1])
        row = memoryview(found).cast("I").tolist()[1:] if found else [0] * TIERS
        return [size * blocks for blocks in row]

    def _compare(self, step: Lookup) -> str:
        ours = self._tokens(step)
        if ours == step.tiers:
            return "equal"
        more = sum(ours) - sum(step.tiers)
        if more < 0:
            return "less"
        if more:
            return "more" if more > self.stream.block_size else "one block more"
        return "nearer" if ours > step.tiers else "further"

    def _apply(self, events: list[KvEvent]) -> None:
        for event in events:
            apply_to_index(self.index, event)


@pytest.mark.parametrize("path", stream_files(), ids=lambda path: path.stem)
def test_the_index_has_what_the_engine_finds(path: Path) -> None:
    replay = Replay(read_stream(path))
    allowed, name = LIMITS.get(path.stem, (set[str](), None))
    found = replay.run()
    assert found["equal"] >= 5
    assert {*found} - {"equal"} <= allowed, found
    assert bool({*found} - {"equal"}) == bool(allowed), found
    names = replay.names()
    assert name in names if name else not names, names
    assert "block_size" not in names
    kept = replay.last_lookups()
    replay.rebuild()
    assert replay.last_lookups() == kept


@pytest.mark.parametrize(
    "name",
    [
        "sglang-hicache-write-back-tenants",
        "vllm-tenants",
        "vllm-disk-tenants",
        "vllm-offloading-tenants",
        "vllm-offloading-described-late-tenants",
    ],
)
def test_a_worker_that_joins_late_believes_nothing_that_is_wrong(name: str) -> None:
    stream = read_stream(FOLDER / f"{name}.gz")
    stream.steps = stream.steps[len(stream.steps) // 3 :]
    found = Replay(stream).run()
    assert {*found} <= {"equal", "less", "further"}
    assert found["equal"]


@pytest.mark.parametrize("has_replay", [True, False])
@pytest.mark.parametrize("name", ["sglang-restarts", "vllm-restarts"])
async def test_restarts_are_noticed_by_the_subscriber(
    tmp_path: Path, name: str, has_replay: bool
) -> None:
    replay = Replay(read_stream(FOLDER / f"{name}.gz"))
    publisher = ZmqPublisher(tmp_path)
    await publisher.start()
    replay_endpoint = publisher.replay if has_replay else None
    feed = EventFeed(0, replay.ledger, replay, publisher.endpoint, replay_endpoint)
    feed.start()
    try:
        await publisher.subscribed()
        for step in replay.stream.steps:
            if isinstance(step, Message):
                await publisher.send_raw(step.payload)
            elif isinstance(step, Restart):
                await publisher.close()
                publisher = ZmqPublisher(tmp_path)
                await publisher.start()
                await publisher.subscribed()
            else:
                await eventually(partial(replay.agrees, step))
    finally:
        await feed.close()
        await publisher.close()
    assert not feed.counts.malformed


@pytest.mark.parametrize("name", ["sglang-adapters", "vllm-adapters", "vllm-tenants"])
@pytest.mark.parametrize("form", ["maps", "arrays"])
def test_fields_of_later_versions_change_nothing(name: str, form: str) -> None:
    stream = read_stream(FOLDER / f"{name}.gz")
    for step in stream.steps:
        if isinstance(step, Message):
            time, events, *rest = msgspec.msgpack.decode(step.payload)
            later = [_later(event) if form == "maps" else _as_array(event) for event in events]
            step.payload = msgspec.msgpack.encode([time, later, *rest, {"more": 1}])
    assert {*Replay(stream).run()} == {"equal"}


def _later(event: dict[str, Any]) -> dict[str, Any]:
    return event | {"a_new_field": [1, {"x": None}], "another": "text"}


def _as_array(event: dict[str, Any]) -> list[Any]:
    """The form of earlier versions, with fields at its end that none has."""
    fields = {
        "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium"
        " lora_name extra_keys group_idx kv_cache_spec_kind",
        "BlockRemoved": "block_hashes medium group_idx",
        "AllBlocksCleared": "",
    }[event["type"]].split()
    return [event["type"], *(event.get(field) for field in fields), *([{"more": 1}] * bool(fields))]
