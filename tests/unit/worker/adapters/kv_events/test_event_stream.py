"""Messages of an engine that are in another form, come together, or come in a flood."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from support.recorder import Recorder
from support.wait import eventually
from support.zmq_publisher import EngineCache

from kvmesh.worker.adapters.kv_events.cache_events import BlocksRemoved, BlocksStored
from kvmesh.worker.adapters.kv_events.decoder import CLEARED, EventDecoder
from kvmesh.worker.adapters.kv_events.feed import EventFeed
from kvmesh.worker.adapters.kv_events.inbox import TURN, Inbox
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.salts import PromptSalts
from kvmesh.worker.adapters.kv_events.subscriber import ZmqSubscriber

SIZE = 4
CACHE = EngineCache(SIZE)


def test_blocks_removed_one_by_one_and_alike_are_one_event() -> None:
    one = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    two = one | {"block_hashes": [2]}
    events = [one, two, two | {"medium": "CPU"}, one | {"reason": "evicted"}, one, two]
    cleared = {"type": "AllBlocksCleared"}
    payload = msgspec.msgpack.encode([0.0, [*events, cleared, two], 0])
    assert EventDecoder().decode(payload) == [
        BlocksRemoved([1, 2]),
        BlocksRemoved([2], 1),
        BlocksRemoved([1], 0, "evicted"),
        BlocksRemoved([1, 2]),
        *CLEARED,
        BlocksRemoved([2]),
    ]


async def test_a_restarted_engine_may_have_other_groups() -> None:
    sink, books = Recorder(), CacheLedger(SIZE, PromptSalts("m", SIZE).root_salt)
    feed = EventFeed(0, books, sink, "ipc:///unused")
    whole, window = "full_attention", "sliding_window"
    for kinds in ((whole, window), (window, whole)):
        feed.clear()
        for number, kind in enumerate(kinds):
            event = CACHE.stored(list(range(8 if kind == whole else 4)))
            event |= {"group_idx": number, "kv_cache_spec_kind": kind}
            feed._on_payload(msgspec.msgpack.encode([0.0, [event], 0]))
        assert len(books) == 2
    await feed.close()


def test_a_chunk_whose_copies_go_in_one_event_is_gone() -> None:
    books = CacheLedger(SIZE, PromptSalts("m", SIZE).root_salt)
    chunk = BlocksStored([501], None, bytes(8 * SIZE), 2 * SIZE, 1)
    books.apply([chunk, chunk])
    assert len(books.apply([BlocksRemoved([501, 501], 1)])) == 1
    assert books.apply([BlocksRemoved([501], 1)]) == []
    assert len(books.dump()) == 1


class Pair:
    """Two connected sockets; the first one's messages reach the inbox of the other."""

    def __init__(self, name: str) -> None:
        self.context = zmq.Context()
        self.sender, self.receiver = (self.context.socket(zmq.PAIR) for _ in range(2))
        self.sender.bind(f"inproc://{name}")
        self.receiver.connect(f"inproc://{name}")
        self.taken: list[list[bytes]] = []
        self.refused = b"stop"
        self.inbox = Inbox(self.receiver, self._take)

    def _take(self, frames: list[bytes]) -> bool:
        if frames == [b"fault"]:
            raise LookupError("fault")
        self.taken.append(frames)
        return frames != [self.refused]


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair("inbox")
    yield made
    made.context.destroy(linger=0)


async def test_messages_are_taken_until_one_is_refused(pair: Pair) -> None:
    pair.sender.send_multipart([b"a", b"", b"b"])
    pair.sender.send(b"stop")
    pair.sender.send(b"later")
    assert not await pair.inbox.read(60.0)
    assert pair.taken == [[b"a", b"", b"b"], [b"stop"]]
    reading = asyncio.create_task(pair.inbox.read(60.0))
    await eventually(lambda: pair.taken[2:] == [[b"later"]])
    pair.sender.send(b"stop")
    assert not await reading


async def test_a_silence_ends_the_reading(pair: Pair) -> None:
    pair.sender.send(b"a")
    assert await pair.inbox.read(0.01)
    assert pair.taken == [[b"a"]]


async def test_a_fault_of_the_receiver_reaches_the_reader(pair: Pair) -> None:
    pair.sender.send(b"fault")
    with pytest.raises(LookupError):
        await pair.inbox.read(60.0)


async def test_a_flood_leaves_the_loop_its_turns(pair: Pair) -> None:
    turns: list[int] = []
    loop = asyncio.get_running_loop()

    def look() -> None:
        turns.append(len(pair.taken))
        loop.call_soon(look)

    for _ in range(5 * TURN):
        pair.sender.send(b"a")
    pair.sender.send(b"stop")
    loop.call_soon(look)
    assert not await pair.inbox.read(60.0)
    assert max(after - before for before, after in itertools.pairwise(turns)) <= TURN


async def test_a_reading_that_is_cancelled_leaves_no_callback(pair: Pair) -> None:
    reading = asyncio.create_task(pair.inbox.read(60.0))
    pair.sender.send(b"a")
    await eventually(lambda: pair.taken)
    reading.cancel()
    await asyncio.wait([reading])
    loop = asyncio.get_running_loop()
    assert not loop.remove_reader(int(pair.receiver.getsockopt(zmq.FD)))


class Heard:
    """Messages of one topic of a subscriber."""

    def __init__(self, endpoint: str, replay: str | None = None) -> None:
        self.delivered: list[bytes] = []
        self.foreign: list[str] = []
        self.restarts = 0
        self.subscriber = ZmqSubscriber(
            endpoint,
            replay,
            "",
            on_payload=self.delivered.append,
            on_restart=self._restart,
            on_gap=lambda count: None,
            on_foreign=self.foreign.append,
        )

    def _restart(self) -> None:
        self.restarts += 1


async def test_messages_in_another_form_are_told_and_lose_no_other(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    heard = Heard(endpoint)
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.bind(endpoint)
        heard.subscriber.start()
        await asyncio.to_thread(publisher.recv)
        for frames in ([b"x"], [b"", b"short", b"x"], [b"", bytes(8), b"payload"]):
            publisher.send_multipart(frames)
        await eventually(lambda: heard.delivered == [b"payload"])
        await heard.subscriber.close()
    assert heard.foreign == [f"a message of {count} frames is no KV event" for count in (1, 3)]


async def test_a_publisher_under_another_topic_is_told_and_no_restart(tmp_path: Path) -> None:
    """Servers behind one address, as a proxy of ZeroMQ joins them."""
    endpoint = f"ipc://{tmp_path}/events"
    heard = Heard(endpoint)
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.bind(endpoint)
        heard.subscriber.start()
        await asyncio.to_thread(publisher.recv)
        for number in range(3):
            for topic in (b"kv-1", b"kv-10"):
                publisher.send_multipart([topic, number.to_bytes(8, "big"), topic])
        await eventually(lambda: len(heard.delivered) + len(heard.foreign) == 6)
        await heard.subscriber.close()
    assert heard.delivered == [b"kv-1"] * 3
    assert heard.foreign == ["messages of topic 'kv-10' beside 'kv-1'"] * 3
    assert heard.restarts == 0


@pytest.mark.parametrize("reply", [[b"hello"], [b"", b"five", b"x"], [b""]])
async def test_a_replay_in_another_form_is_told_and_stops_nothing(
    reply: list[bytes], tmp_path: Path
) -> None:
    """The address of another service."""
    heard = Heard(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    with zmq.asyncio.Context() as context:
        publisher, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        publisher.bind(f"ipc://{tmp_path}/events")
        router.bind(f"ipc://{tmp_path}/replay")
        heard.subscriber.start()
        await asyncio.wait_for(publisher.recv(), 60.0)
        client, *_ = await asyncio.wait_for(router.recv_multipart(), 60.0)
        await router.send_multipart([client, *reply])
        await publisher.send_multipart([b"", bytes(8), b"payload"])
        await eventually(lambda: heard.delivered == [b"payload"])
        await heard.subscriber.close()
        context.destroy(linger=0)
    assert heard.foreign[0] == f"a reply of {len(reply)} frames is no replay"
