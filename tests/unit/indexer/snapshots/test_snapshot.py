"""Snapshots: captured state is restored, damaged snapshots are refused."""

import hashlib
import struct
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.bus.messages import Cleared, KvEvent, Removed, Stored
from kvmesh.hashing import sequence_hashes
from kvmesh.index import create_index
from kvmesh.indexer.decoding import Events, EventSource
from kvmesh.indexer.rank_state import RankStates
from kvmesh.indexer.snapshots.snapshot import (
    DamagedSnapshot,
    ForeignSnapshot,
    Header,
    Packer,
    capture,
    check,
    restore,
)

STREAM = "2026-11-21"
PROMPTS = [(1, 2, 3), (1, 2, 4), (1, 5), (6,), (7, 8, 9, 10)]


def pack(hashes: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def stored(prompt: tuple[int, ...]) -> Stored:
    return Stored(0, None, pack(tuple(h + 1000 for h in prompt)), pack(prompt), 7)


def batch(first: int, *events: KvEvent, instance: str = "w-1", rank: int = 0) -> Events:
    return Events(EventSource("m", instance[0]), instance, rank, first, 0.0, list(events))


def contents(states: RankStates) -> list[dict[tuple[str, int], int]]:
    """Depth of each prompt on each rank."""
    found: list[dict[tuple[str, int], int]] = []
    for prompt in PROMPTS:
        rows = struct.iter_unpack("<5I", states.index.find(sequence_hashes(pack(prompt), 7)))
        depths = {}
        for slot, depth, *_ in rows:
            key = states.keys[slot]
            depths[key.instance, key.rank] = depth
        found.append(depths)
    return found


def snapshot(states: RankStates, covered: int = 9) -> bytes:
    packer = Packer()
    for image in capture(states):
        packer.add(image)
    return packer.finish(Header("whole", STREAM, covered, 0.0, states.incarnations.ignored))


@pytest.fixture
def states() -> RankStates:
    states = RankStates(create_index())
    states.apply(batch(0, *map(stored, PROMPTS)))
    states.apply(batch(5, Removed(0, pack((1002,)))))
    states.apply(batch(0, stored(PROMPTS[0]), instance="v-1", rank=3))
    states.apply(batch(4, stored(PROMPTS[1]), instance="u-1"))
    states.apply(batch(0, stored(PROMPTS[3]), instance="t-1"))
    states.apply(batch(0, stored(PROMPTS[4]), instance="t-2"))
    return states


def test_a_captured_state_is_restored(states: RankStates) -> None:
    copy = RankStates(create_index())
    assert restore(copy, snapshot(states), "whole", STREAM) == 9
    assert contents(copy) == contents(states)
    for side in (copy, states):
        side.apply(batch(6, stored(PROMPTS[0])))  # continues where its ids left off
        side.apply(batch(1, stored(PROMPTS[1]), instance="t-1"))  # was replaced by t-2
        side.apply(batch(5, Cleared(), stored(PROMPTS[2]), instance="u-1"))  # was unknown
    assert contents(copy) == contents(states)
    assert contents(copy)[0] == {("w-1", 0): 3, ("v-1", 3): 3, ("u-1", 0): 1}


def test_an_empty_index_has_a_snapshot_too() -> None:
    copy = RankStates(create_index())
    assert restore(copy, snapshot(RankStates(create_index()), 5), "whole", STREAM) == 5
    assert copy.ranks == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"x",
        lambda data: data[:12] + bytes([data[12] ^ 1]) + data[13:],
        lambda data: data[:-5] + bytes([data[-5] ^ 128]) + data[-4:],
    ],
)
def test_a_damaged_snapshot_is_refused(
    states: RankStates, damage: Callable[[bytes], bytes]
) -> None:
    data = damage(snapshot(states))
    with pytest.raises(DamagedSnapshot):
        restore(RankStates(create_index()), data, "whole", STREAM)


@pytest.mark.parametrize(
    ("shard", "stream"), [("root-0of2", STREAM), ("whole", "2020-01-01"), ("", "")]
)
def test_a_snapshot_of_another_shard_or_stream_is_refused(
    states: RankStates, shard: str, stream: str
) -> None:
    with pytest.raises(ForeignSnapshot):
        restore(RankStates(create_index()), snapshot(states), shard, stream)


def test_a_snapshot_of_another_version_is_refused(states: RankStates) -> None:
    data = bytearray(snapshot(states))
    data[8] += 1
    with pytest.raises(ForeignSnapshot, match="version 2"):
        check(bytes(data))


def test_a_snapshot_without_its_end_is_refused() -> None:
    body = zstandard.ZstdCompressor().compress(b"")
    digest = hashlib.blake2b(body, digest_size=16).digest()
    data = b"kvmindex" + struct.pack("<H", 1) + digest + body
    with pytest.raises(DamagedSnapshot, match="no end"):
        restore(RankStates(create_index()), data, "whole", STREAM)


@st.composite
def histories(draw: st.DrawFn) -> list[Events]:
    """Messages of three ranks in stream order: some lost, some repeated, some dumps."""
    messages: list[Events] = []
    following = dict.fromkeys(("w-1", "v-1", "v-2"), 0)
    for _ in range(draw(st.integers(1, 25))):
        instance = draw(st.sampled_from(["w-1", "v-1", "v-2"]))
        prompt = draw(st.sampled_from(PROMPTS))
        kind = draw(st.sampled_from(["store", "store", "remove", "clear", "dump"]))
        events: dict[str, list[KvEvent]] = {
            "store": [stored(prompt)],
            "remove": [Removed(0, pack((prompt[-1] + 1000,)))],
            "clear": [Cleared(0)],
            "dump": [Cleared(), stored(prompt)],
        }
        made = batch(following[instance], *events[kind], instance=instance)
        following[instance] += len(events[kind])
        messages += [made] * draw(st.sampled_from([1, 1, 1, 1, 2, 0]))
    return messages


@settings(max_examples=200, deadline=None)
@given(history=histories(), data=st.data())
def test_a_snapshot_taken_while_events_flow_loses_nothing(
    history: list[Events], data: st.DataObject
) -> None:
    """Capture starts after message `covered` and ends some messages later."""
    covered = data.draw(st.integers(0, len(history)), "covered")
    live = RankStates(create_index())
    for message in history[:covered]:
        live.apply(message)
    at = covered
    packer = Packer()
    for image in capture(live):
        packer.add(image)
        until = data.draw(st.integers(at, len(history)), "until")
        for message in history[at:until]:
            live.apply(message)
        at = until
    header = Header("whole", STREAM, covered, 0.0, live.incarnations.ignored)
    for message in history[at:]:
        live.apply(message)
    copy = RankStates(create_index())
    restore(copy, packer.finish(header), "whole", STREAM)
    for message in history[covered:]:
        copy.apply(message)
    assert contents(copy) == contents(live)
