"""KV events of vLLM and SGLang: decoding, ledger, and a subscriber without losses."""

from array import array
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from time import process_time
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from support.index_events import apply_to_index
from support.wait import eventually
from support.zmq_publisher import EngineCache, ZmqPublisher

from kvmesh.bus.messages import Cleared, KvEvent, PromptImage, Sampling, Stored, Work
from kvmesh.hashing import block_hashes, image_tokens, salt
from kvmesh.index import create_index
from kvmesh.worker.adapters.kv_events.cache_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    fold_hash,
    medium_tier,
)
from kvmesh.worker.adapters.kv_events.decoder import EventDecoder, MalformedEvents
from kvmesh.worker.adapters.kv_events.feed import EventFeed
from kvmesh.worker.adapters.kv_events.images import identifier
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.salts import PromptSalts
from kvmesh.worker.adapters.kv_events.subscriber import event_endpoints, rank_endpoint
from kvmesh.worker.engine import EngineError, OutputDelta

SIZE = 4
SALT = salt("m")
CACHE = EngineCache(SIZE)


def pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def stored(tokens: list[int], start: int = 0, key: str = "") -> BlocksStored:
    names = EngineCache(SIZE, key).hashes(tokens)
    parent = names[start - 1] if start else None
    whole = tokens[start * SIZE : len(names) * SIZE]
    return BlocksStored(names[start:], parent, pack(whole), SIZE)


def ledger(counted: bool = True) -> CacheLedger:
    return CacheLedger(SIZE, PromptSalts("m", SIZE).root_salt, counted)


def replay(events: list[KvEvent]) -> dict[int, int]:
    """Feed events to an index; returns blocks held by tier."""
    index = create_index()
    for event in events:
        apply_to_index(index, event)
    rows = memoryview(index.ranks()).cast("I").tolist()
    return {tier: rows[1 + tier] for tier in range(4) if rows and rows[1 + tier]}


def depth(events: list[KvEvent], tokens: list[int], seed: int = SALT) -> int:
    index = create_index()
    for event in events:
        apply_to_index(index, event)
    found = index.find(block_hashes(pack(tokens), SIZE, seed)[1])
    return sum(memoryview(found).cast("I").tolist()[1:]) if found else 0


# decoding


def decode(*events: Any) -> list[CacheEvent]:
    return EventDecoder().decode(msgspec.msgpack.encode([1.0, list(events), 0]))


def test_maps_and_arrays_mean_the_same() -> None:
    event = CACHE.stored(list(range(8)))
    as_array = [event[key] for key in list(event)[: -1 if "extra_keys" in event else None]]
    assert decode(event) == decode(as_array)
    [decoded] = decode(event)
    assert decoded == stored(list(range(8)))


def test_fields_that_an_engine_leaves_out_have_defaults() -> None:
    array_form = ["BlockStored", [-5, 7], None, list(range(8)), SIZE, None]
    assert decode(array_form) == [
        BlocksStored([(1 << 64) - 5, 7], None, pack(list(range(8))), SIZE)
    ]
    assert decode(["BlockRemoved", [-5]]) == [BlocksRemoved([(1 << 64) - 5])]
    cleared = [AllCleared(0), AllCleared(1, maybe=True)]
    assert decode(["AllBlocksCleared"], {"type": "AllBlocksCleared"}) == cleared * 2
    assert decode(["SomethingNew", 1, 2], {"type": "Other"}) == []


@pytest.mark.parametrize(
    ("locality", "tiers"), [(None, [0, 1]), ("LOCAL", [0, 1, 2]), ("REMOTE", [0, 1])]
)
def test_files_outlive_a_reset_unless_the_engine_uses_them_like_memory(
    locality: str | None, tiers: list[int]
) -> None:
    event = CACHE.stored(list(range(8))) | {"medium": "STORAGE", "locality": locality}
    found = decode(event, {"type": "AllBlocksCleared"})
    assert [each.tier for each in found if isinstance(each, AllCleared)] == tiers


def test_events_before_the_group_is_chosen_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second look at each of them, in every later message, would take more and more time."""
    decoder, looks = EventDecoder(), list[int]()
    choose = decoder._choose_group

    def counted(raws: list[Any]) -> bool:
        looks.append(len(raws))
        return choose(raws)

    monkeypatch.setattr(decoder, "_choose_group", counted)

    def decoded(kind: str, **fields: Any) -> list[CacheEvent]:
        event = {"type": kind, "block_hashes": [7], "group_idx": 0, **fields}
        return decoder.decode(msgspec.msgpack.encode([1.0, [event], 0]))

    for _ in range(50):
        assert decoded("BlockRemoved") == decoded("OfALaterVersion") == []
    [*removed, one] = decoded("BlockStored", token_ids=[1], block_size=1, parent_block_hash=None)
    assert looks == [1] * 101
    assert isinstance(one, BlocksStored)
    assert removed == [BlocksRemoved([7] * 50)]


def test_digests_and_the_integers_made_of_them_are_one_hash() -> None:
    digest = bytes(range(32))
    assert fold_hash(digest) == int.from_bytes(digest, "big") & ((1 << 64) - 1)
    assert fold_hash(-1) == (1 << 64) - 1


def test_media_are_tiers() -> None:
    names = (None, "GPU", "CPU", "CPU_PINNED", "cpu_tier2", "DISK", "STORAGE", "REMOTE", "EXTERNAL")
    assert [medium_tier(name) for name in names] == [0, 0, 1, 1, 2, 2, 2, 3, 3]
    spelled = ("device", "cuda:1", "NPU", "", "host-pinned", "DRAM", "local_cpu", "ssd", "Fs", "s3")
    assert [medium_tier(name) for name in spelled] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]


def test_an_adapter_that_only_has_a_number_is_in_no_prompt_of_the_mesh() -> None:
    tokens = list(range(8))
    [plain] = decode(CACHE.stored(tokens) | {"extra_keys": None})
    [numbered] = decode(CACHE.stored(tokens) | {"extra_keys": None, "lora_id": 3})
    books = ledger()
    assert depth(books.apply([numbered]), tokens) == 0
    assert depth(books.apply([plain]), tokens) == 2


@pytest.mark.parametrize(
    "odd",
    [
        *(None, 7, "heartbeat", [], {"block_hashes": [1]}, {"type": "BlockRemoved"}),
        {**CACHE.stored(list(range(20, 28))), "token_ids": ["a"] * 8},
        {**CACHE.stored(list(range(20, 28))), "medium": 0},
        {**CACHE.stored(list(range(20, 28))), "extra_keys": ["flat", None]},
        # a field of another name is not a block without a parent
        {k: v for k, v in CACHE.stored(list(range(28)), 5).items() if k != "parent_block_hash"},
    ],
)
def test_an_event_that_cannot_be_read_loses_no_other(odd: Any) -> None:
    tokens = list(range(8))
    removed = {"type": "BlockRemoved", "block_hashes": CACHE.stored(tokens)["block_hashes"][1:]}
    others = decode(CACHE.stored(tokens), removed)
    payload = msgspec.msgpack.encode([1.0, [CACHE.stored(tokens), odd, removed], 0])
    with pytest.raises(MalformedEvents, match="malformed KV event") as raised:
        EventDecoder().decode(payload)
    assert raised.value.others == others


@pytest.mark.parametrize("odd", [None, 7, "heartbeat", [], {}, {"type": 1}])
def test_values_that_are_no_events_cost_less_than_events(odd: Any) -> None:
    """Events of the same number, each of which changes nothing."""
    event = {"type": "BlockRemoved", "block_hashes": [1]}
    messages = [msgspec.msgpack.encode([1.0, [each] * 100, 0]) for each in (event, odd)]
    seconds = [[], []]  # type: list[list[float]]
    for _ in range(9):
        for payload, of_kind in zip(messages, seconds, strict=True):
            decoder, started = EventDecoder(), process_time()
            for _ in range(20):
                with suppress(MalformedEvents):
                    decoder.decode(payload)
            of_kind.append(process_time() - started)
    good, bad = map(min, seconds)
    assert bad < good


def test_the_salt_comes_back_out_of_the_extra_keys() -> None:
    keys = [["lora-a", f"kvm{123:016x}"], None]
    [event] = decode(CACHE.stored(list(range(8)), lora_name="lora-a", extra_keys=keys))
    assert isinstance(event, BlocksStored)
    assert (event.salt, event.adapter) == (123, "lora-a")
    [other] = decode(CACHE.stored(list(range(8)), extra_keys=[["not a salt"], None]))
    assert isinstance(other, BlocksStored)
    assert other.salt is None


def test_one_group_of_a_hybrid_model_speaks_for_all() -> None:
    decoder = EventDecoder()
    window = CACHE.stored(list(range(8)), group_idx=0, kv_cache_spec_kind="sliding_window")
    full = CACHE.stored(list(range(8)), group_idx=1, kv_cache_spec_kind="full_attention")
    gone = [CACHE.removed(list(range(8)), 0) | {"group_idx": group} for group in (0, 1)]
    payload = msgspec.msgpack.encode([1.0, [window, full, *gone], 0])
    kinds = [type(event) for event in decoder.decode(payload)]
    assert kinds == [BlocksStored, BlocksRemoved]


def test_blocks_of_pairs_have_the_first_token_of_each() -> None:
    """SGLang with a draft model: a page of n pairs stands for n tokens and the one after them."""
    pairs = [[token, token + 1] for token in range(8)]
    [event] = decode(CACHE.stored(list(range(8))) | {"token_ids": pairs})
    assert event == stored(list(range(8)))


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({"token_ids": [[token, token + 1] for token in range(8)]}, {"draft"}),
        ({"lookahead_token_ids": [[4], [8]]}, {"draft"}),
        ({"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}, {"windows"}),
        ({"group_idx": 0, "kv_cache_spec_kind": "full_attention"}, set()),
    ],
)
def test_modes_that_the_index_cannot_match_are_named(
    fields: dict[str, Any], limits: set[str]
) -> None:
    decoder = EventDecoder()
    decoder.decode(msgspec.msgpack.encode([1.0, [CACHE.stored(list(range(8))) | fields], 0]))
    assert decoder.limits == limits


@pytest.mark.parametrize("kind", ["sliding_window", "chunked_local_attention", "of_next_year"])
def test_a_model_of_windows_alone_is_known_by_its_first_group(kind: str) -> None:
    decoder = EventDecoder()
    event = CACHE.stored(list(range(8)), group_idx=0, kv_cache_spec_kind=kind)
    other = event | {"group_idx": 1}
    gone = CACHE.removed(list(range(8)), 0) | {"group_idx": 0}
    payload = msgspec.msgpack.encode([1.0, [event, other, gone], 0])
    kinds = [type(found) for found in decoder.decode(payload)]
    assert kinds == [BlocksStored, BlocksRemoved]


def test_a_group_of_whole_prefixes_takes_over_from_one_of_windows() -> None:
    decoder = EventDecoder()

    def kinds_of(*events: Any) -> list[type]:
        payload = msgspec.msgpack.encode([1.0, list(events), 0])
        return [type(event) for event in decoder.decode(payload)]

    window = CACHE.stored(list(range(8)), group_idx=0, kv_cache_spec_kind="sliding_window")
    full = CACHE.stored(list(range(8)), group_idx=1, kv_cache_spec_kind="full_attention")
    named = window | {"token_ids": [], "block_size": 0, "kv_cache_spec_kind": None}
    assert kinds_of(named) == []  # waits, since it says nothing of its group
    assert kinds_of(window) == [BlocksStored, BlocksStored]
    assert kinds_of(window, full) == [AllCleared, BlocksStored]
    assert kinds_of(window) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_keys": [["0123456789abcdef"], None]},
        {"extra_keys": [["of-a-client-0123456789abcdef"], None]},
        {"extra_keys": [["lora-a", "mine"], None], "lora_name": "lora-a"},
        {"extra_keys": [["lora-a", "lora-a"], None], "lora_name": "lora-a"},
        {"cache_salt": "mine"},
    ],
)
def test_a_clients_own_salt_separates_its_blocks(fields: dict[str, Any]) -> None:
    tokens = list(range(8))
    event = CACHE.stored(tokens) | fields
    if "cache_salt" in fields:
        del event["extra_keys"]
    books = ledger()
    told = books.apply(decode(event))
    assert len(books) == 2
    assert depth(told, tokens) == depth(told, tokens, salt("m", "lora-a")) == 0


def test_an_image_separates_the_blocks_from_its_own_on() -> None:
    tokens = list(range(12))
    event = CACHE.stored(tokens, extra_keys=[None, [["image-1", 3]], None])
    assert depth(ledger().apply(decode(event)), tokens) == 1


@pytest.mark.parametrize("prefix", ["", "lora-a:"])
def test_an_image_of_the_mesh_has_the_tokens_of_its_prompt(prefix: str) -> None:
    image, tokens = PromptImage(bytes(range(32)), 2, 7), array("I", range(12)).tobytes()
    name = prefix + identifier(image)
    keys = [[["another", 0], [name, 2]], [[name, -2]], [[name, -6], ["more", 1]]]
    [event] = decode(CACHE.stored(list(range(12)), extra_keys=keys))
    assert isinstance(event, BlocksStored)
    ids = image_tokens(image.digest, image.length)
    assert event.tokens == tokens[: 2 * 4] + ids + tokens[9 * 4 :]
    assert [bool(extra) for extra in event.extras] == [True, False, True]
    for others in (None, [name, "x"], [name], [7, 1], ["kvm-image-" + "g" * 64 + "-7", 1]):
        [event] = decode(CACHE.stored(list(range(12)), extra_keys=[[others], None, None]))
        assert isinstance(event, BlocksStored)
        assert event.tokens == tokens


@pytest.mark.parametrize("name", [identifier(PromptImage(bytes(32), 2, 7)), "another"])
def test_a_lower_tier_does_not_tell_of_an_image(name: str) -> None:
    prompt, pictured = list(range(8)), EngineCache(SIZE, "image")
    image = pictured.stored(prompt) | {"extra_keys": [None, [[name, 0]]]}
    below = pictured.stored(prompt) | {"medium": "CPU", "extra_keys": None}
    removed = {"type": "BlockRemoved", "block_hashes": image["block_hashes"]}
    for order in ([image, removed, below], [image, below, removed]):
        assert depth(ledger().apply(decode(*order)), prompt) == 1
    # the same text with another image, of which only the lower tier has told
    first = CACHE.stored(prompt[:SIZE]) | {"extra_keys": None}
    other = below | {"block_hashes": [77], "token_ids": prompt[SIZE:]}
    other["parent_block_hash"] = first["block_hashes"][0]
    books = ledger()
    assert depth(books.apply(decode(image, first, other)), prompt) == 1
    assert books.counts(0, 0, "").unplaced == 1


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([1.0, [7], 0])]
)
def test_malformed_payloads_are_one_kind_of_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match="malformed KV event"):
        EventDecoder().decode(payload)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": -SIZE},
        {"block_size": "4"},
        {"block_size": None},
        {"block_hashes": b"12345678"},
        {"block_hashes": [1.5, 2]},
        {"lora_name": ["a"]},
        {"medium": 1},
        {"token_ids": [[1, 2, 3]] * 8},
        {"token_ids": [-1] * 8},
        {"extra_keys": [None, None, ["a"]]},
    ],
)
def test_fields_of_another_type_are_malformed(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="malformed KV event"):
        decode(CACHE.stored(list(range(8))) | fields)


@pytest.mark.parametrize("tokens", [[], [1], list(range(8))])
def test_an_event_without_blocks_changes_nothing(tokens: list[int]) -> None:
    books = ledger()
    event = CACHE.stored(list(range(8))) | {"block_hashes": [], "token_ids": tokens}
    assert books.apply(decode(event | {"extra_keys": None})) == []
    assert books.apply(decode(event | {"extra_keys": None, "block_size": 1})) == []


def test_an_embedded_engine_publishes_on_sockets_in_its_own_folder(tmp_path: Path) -> None:
    for endpoint in event_endpoints(tmp_path).values():
        assert endpoint.startswith(f"ipc://{tmp_path}/")
        assert "tcp" in endpoint
        assert endpoint.rpartition(":")[2].isdecimal()


def test_ranks_publish_on_consecutive_ports() -> None:
    assert rank_endpoint("tcp://host:5557", 2) == "tcp://host:5559"
    assert rank_endpoint("ipc:///tmp/x", 2) == "ipc:///tmp/x"


# ledger


def test_tokens_are_hashed_again_under_the_salt_of_the_mesh() -> None:
    tokens = list(range(12))
    [event] = ledger().apply([stored(tokens)])
    assert isinstance(event, Stored)
    assert event.salt == SALT
    assert event.local == block_hashes(pack(tokens), SIZE)[0]
    assert depth([event], tokens) == 3


def test_a_second_copy_outlives_the_removal_of_the_first() -> None:
    books = ledger()
    events = books.apply([stored(list(range(8))), stored(list(range(8)))])
    assert len(events) == 1
    gone = BlocksRemoved(stored(list(range(8))).hashes)
    assert books.apply([gone]) == []
    assert len(books.apply([gone])) == 1
    assert books.apply([gone]) == []


def test_a_block_stored_twice_is_held_once() -> None:
    books = ledger(counted=False)
    books.apply([stored(list(range(8))), stored(list(range(8)))])
    assert len(books.apply([BlocksRemoved(stored(list(range(8))).hashes)])) == 1
    assert len(books) == 0


def test_blocks_that_fit_no_place_are_counted_by_reason() -> None:
    books = ledger()
    assert books.apply([BlocksStored([1], None, pack([1, 2]), 2)]) == []
    assert books.apply([BlocksStored([1, 2], None, pack([1, 2, 3, 4]), SIZE)]) == []
    assert books.apply([stored(list(range(12)), start=1)]) == []
    assert books.dropped == {"block_size": [1, 0, 0, 0], "tokens": [2, 0, 0, 0]}
    assert books.odd_size == 2
    assert books.counts(0, 0, "").unplaced == 2
    assert books.apply([BlocksRemoved(stored(list(range(12))).hashes)]) == []
    assert books.counts(0, 0, "").unplaced == 0
    assert books.dropped["unknown_position"] == [2, 0, 0, 0]


def test_blocks_offloaded_to_another_node_are_remote() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}
    payload = msgspec.msgpack.encode([0.0, [event, {**event, "locality": "REMOTE"}], 0])
    decoded = EventDecoder().decode(payload)
    assert decoded == [BlocksRemoved([1], 1), BlocksRemoved([1], 3)]


def test_tiers_are_separate() -> None:
    books = ledger()
    root = stored(list(range(8)))
    host = BlocksStored(root.hashes, None, root.tokens, SIZE, tier=1)
    events = books.apply([root, host, BlocksRemoved(root.hashes, 0)])
    assert replay(events) == {1: 2}
    assert replay(books.dump()) == {1: 2}
    events += books.apply([BlocksRemoved(root.hashes, None)])
    assert replay(events) == {}


def test_a_prompt_without_salt_in_its_event_is_known_by_its_first_block() -> None:
    salts = PromptSalts("m", SIZE, limit=2)
    books = CacheLedger(SIZE, salts.root_salt)
    tokens = list(range(8))
    salts.remember(work(tokens, salt_=99))
    assert depth(books.apply([stored(tokens)]), tokens, 99) == 2
    assert books.cached_tokens(work(tokens, salt_=99)) == 8
    assert books.cached_tokens(work(tokens, salt_=98)) == 0
    salts.remember(work(list(range(50, 58)), salt_=1))
    salts.remember(work(list(range(60, 68)), salt_=1))
    assert salts.root_salt(stored(tokens), lambda _: False) == SALT


def test_only_a_tenant_is_tagged() -> None:
    salts = PromptSalts("m", SIZE)
    assert salts.cache_salt(work([1], salt_=SALT)) is None
    assert salts.cache_salt(work([1], salt_=0xAB)) == "kvm00000000000000ab"


def test_cache_salts_differ_for_tenants_with_equal_salts() -> None:
    salts = PromptSalts("m", SIZE)
    tags = {salts.cache_salt(work([1], salt_, tenant)) for tenant in "ab" for salt_ in (SALT, 0xAB)}
    assert len(tags) == 4
    assert salts.cache_salt(work([1], 0xAB, "a/b")) == "a.b-kvm00000000000000ab"
    first, other = work([1], 7, "a"), work([1], 7, "b")
    assert [salts.is_exclusive(item) for item in (first, first, other, first, other)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert salts.is_exclusive(work([1], SALT))
    assert not salts.is_exclusive(work([1], SALT, "a"))
    assert not salts.is_exclusive(work([1], SALT))
    [event] = decode(CACHE.stored(list(range(8)), extra_keys=[["a/b-kvm00000000000000ab"], None]))
    assert isinstance(event, BlocksStored)
    assert event.salt == 0xAB


def work(tokens: list[int], salt_: int, tenant: str = "") -> Work:
    sampling = Sampling(max_tokens=1)
    return Work(
        request="r",
        frontend="f",
        tokens=pack(tokens),
        sampling=sampling,
        salt=salt_,
        tenant=tenant,
    )


PROMPTS = [[first, *range(7 + 4 * first)] for first in range(5)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["store", "evict", "clear"]), st.integers(0, 99))))
def test_replayed_events_match_the_cache(actions: list[tuple[str, int]]) -> None:
    """The engine holds copies, evicts any block, and reports every change."""
    books, told = ledger(), list[KvEvent]()
    copies: list[tuple[int, int]] = []  # (engine hash, its parent)
    for action, number in actions:
        if action == "store":
            event = stored(PROMPTS[number % len(PROMPTS)])
            copies += [(name, 0) for name in event.hashes]
            told += books.apply([event])
        elif action == "evict" and copies:
            name, _ = copies.pop(number % len(copies))
            told += books.apply([BlocksRemoved([name])])
        elif action == "clear" and number < 20:
            copies.clear()
            told += books.apply([AllCleared()])
    held = {name for name, _ in copies}
    assert replay(told) == replay(books.dump()) == ({0: len(held)} if held else {})
    for prompt in PROMPTS:
        names = EngineCache(SIZE).hashes(prompt)
        leading = next((i for i, name in enumerate(names) if name not in held), len(names))
        assert depth(told, prompt) == depth(books.dump(), prompt) == leading


# the subscriber


class Sink:
    """Records events."""

    def __init__(self) -> None:
        self.told: list[KvEvent] = []

    def events(self, rank: int, events: list[KvEvent]) -> None:
        self.told += events

    def output(self, deltas: list[OutputDelta]) -> None: ...

    def events_lost(self, rank: int, count: int) -> None: ...

    def failed(self, error: EngineError) -> None: ...


@pytest_asyncio.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[ZmqPublisher]:
    made = ZmqPublisher(tmp_path)
    await made.start()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def sink() -> Sink:
    return Sink()


@pytest_asyncio.fixture
async def feed(publisher: ZmqPublisher, sink: Sink) -> AsyncIterator[EventFeed]:
    made = EventFeed(0, ledger(), sink, publisher.endpoint, publisher.replay)
    made.start()
    await publisher.subscribed()
    yield made
    await made.close()


async def test_messages_arrive_in_order(
    feed: EventFeed, publisher: ZmqPublisher, sink: Sink
) -> None:
    tokens = list(range(40))
    for start in range(10):
        await publisher.send(CACHE.stored(tokens[: 4 * start + 4], start))
    await eventually(lambda: depth(sink.told, tokens) == 10)


async def test_messages_before_the_subscription_are_replayed(
    publisher: ZmqPublisher, sink: Sink
) -> None:
    tokens = list(range(12))
    await publisher.send(CACHE.stored(tokens[:8]), lose=True)
    made = EventFeed(0, ledger(), sink, publisher.endpoint, publisher.replay)
    made.start()
    await publisher.subscribed()
    await publisher.send(CACHE.stored(tokens, 2))
    await eventually(lambda: depth(sink.told, tokens) == 3)
    await made.close()


async def test_a_gap_is_filled_from_the_replay(
    feed: EventFeed, publisher: ZmqPublisher, sink: Sink
) -> None:
    tokens = list(range(16))
    await publisher.send(CACHE.stored(tokens[:4]))
    await publisher.send(CACHE.stored(tokens[:8], 1), lose=True)
    await publisher.send(CACHE.stored(tokens[:12], 2), lose=True)
    await publisher.send(CACHE.stored(tokens, 3))
    await eventually(lambda: depth(sink.told, tokens) == 4)
    assert not any(isinstance(event, Cleared) for event in sink.told)


async def test_a_lost_last_message_is_found_when_all_is_quiet(
    feed: EventFeed, publisher: ZmqPublisher, sink: Sink
) -> None:
    tokens = list(range(8))
    await publisher.send(CACHE.stored(tokens[:4]))
    await publisher.send(CACHE.stored(tokens, 1), lose=True)
    await eventually(lambda: depth(sink.told, tokens) == 2)
    await publisher.send(CACHE.removed(tokens, 1))
    await eventually(lambda: depth(sink.told, tokens) == 1)
    assert not any(isinstance(event, Cleared) for event in sink.told)


async def test_messages_lost_for_good_cause_a_dump(
    feed: EventFeed, publisher: ZmqPublisher, sink: Sink
) -> None:
    tokens = list(range(8))
    await publisher.send(CACHE.stored(tokens))
    await eventually(lambda: sink.told)
    await publisher.send(CACHE.stored(list(range(50, 58))), lose=True)
    publisher.sent.clear()
    await publisher.send(CACHE.stored(list(range(70, 78))))
    await eventually(lambda: depth(sink.told, list(range(70, 78))) == 2)
    assert sum(isinstance(event, Cleared) for event in sink.told) == 1
    assert depth(sink.told, tokens) == 2
    assert feed.counts.lost == 1


async def test_a_malformed_message_is_counted_and_no_gap(
    feed: EventFeed, publisher: ZmqPublisher, sink: Sink
) -> None:
    for _ in range(5):
        await publisher.send_raw(b"nonsense")
    await publisher.send(CACHE.stored(list(range(8))))
    await eventually(lambda: depth(sink.told, list(range(8))) == 2)
    assert feed.counts.malformed == 5
    assert not any(isinstance(event, Cleared) for event in sink.told)


async def test_a_restart_is_seen_when_the_numbers_have_passed_those_before(
    feed: EventFeed, publisher: ZmqPublisher, sink: Sink
) -> None:
    """The publisher's replay has other messages for the same numbers."""
    await publisher.send(CACHE.stored(list(range(8))))
    await eventually(lambda: depth(sink.told, list(range(8))) == 2)
    publisher.restart_numbering()
    for first in range(20, 24):
        await publisher.send(CACHE.stored(list(range(first, first + 8))), lose=True)
    await publisher.send(CACHE.stored(list(range(90, 98))))
    await eventually(lambda: depth(sink.told, list(range(90, 98))) == 2)
    assert depth(sink.told, list(range(8))) == 0
    assert depth(sink.told, list(range(20, 28))) == 2


async def test_a_restarted_engine_has_an_empty_cache(
    feed: EventFeed, publisher: ZmqPublisher, sink: Sink
) -> None:
    for first in range(3):
        await publisher.send(CACHE.stored(list(range(first, first + 8))))
    await eventually(lambda: len(sink.told) == 3)
    publisher.restart_numbering()
    await publisher.send(CACHE.stored(list(range(90, 98))))
    await eventually(lambda: replay(sink.told) == {0: 2})
    assert depth(sink.told, list(range(90, 98))) == 2


@pytest.mark.parametrize("has_replay", [True, False])
async def test_another_publisher_at_the_same_address_is_a_restart(
    tmp_path: Path, sink: Sink, has_replay: bool
) -> None:
    """Its numbers have passed the former ones before the subscriber is connected again."""
    first = ZmqPublisher(tmp_path)
    await first.start()
    made = EventFeed(0, ledger(), sink, first.endpoint, first.replay if has_replay else None)
    made.start()
    await first.subscribed()
    for start in range(3):
        await first.send(CACHE.stored(list(range(start, start + 8))))
    await eventually(lambda: len(sink.told) == 3)
    await first.close()
    second = ZmqPublisher(tmp_path)
    await second.start()
    for start in range(40, 45):
        await second.send(CACHE.stored(list(range(start, start + 8))), lose=True)
    await second.subscribed()
    await second.send(CACHE.stored(list(range(90, 98))))
    await eventually(lambda: depth(sink.told, list(range(90, 98))) == 2)
    assert [depth(sink.told, list(range(start, start + 8))) for start in range(3)] == [0, 0, 0]
    assert depth(sink.told, list(range(40, 48))) == (2 if has_replay else 0)
    await made.close()
    await second.close()


def test_tenants_with_the_same_first_block_get_salts_in_order_of_waiting() -> None:
    salts = PromptSalts("m", SIZE)
    books = CacheLedger(SIZE, salts.root_salt)
    tokens = list(range(8))
    for tenant in (1, 2, 2):
        salts.remember(work(tokens, salt_=tenant))
    told = books.apply([stored(tokens, key="one"), stored(tokens, key="two")])
    assert (depth(told, tokens, 1), depth(told, tokens, 2)) == (2, 2)
    salts.remember(work(tokens, salt_=1))  # found in the cache: no event
    salts.remember(work(tokens, salt_=3))
    told += books.apply([stored(tokens, key="three")])
    assert depth(told, tokens, 3) == 2
