"""A worker's kvbm client and the kvbm: transfers, and the loss of either."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from support.small_kvbm import KEY, SmallKvbm
from support.wait import eventually

from kvmesh.blocks import attachment
from kvmesh.blocks.arena import ArenaView
from kvmesh.blocks.attachment import Attachment, WorkerIdentity
from kvmesh.blocks.digests import chain_digests, root_digest
from kvmesh.blocks.kvbm_client import FetchedPart, KvbmClient, KvbmPrompt, PendingWrite, TierSpeeds
from kvmesh.blocks.write_through import WriteThrough
from kvmesh.bus.client import Bus
from kvmesh.bus.messages import (
    Attach,
    Commit,
    Computed,
    Corrupt,
    Declined,
    Detach,
    Fetch,
    Finish,
    KvLayout,
    LayerLayout,
    Offer,
)
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.hashing import block_hashes
from kvmesh.prompt_delta.blocks import BlockPromptCache

LAYOUT = KvLayout(
    weights="w", dtype="float32", item_bytes=4, block_size=4, layers=[LayerLayout(1, 4, 4)]
)
TENANT = WorkerIdentity(node="here", instance="w-1", model="m", layout=LAYOUT)
Start = Callable[..., Awaitable[SmallKvbm]]


def prompt(blocks: int, first: int = 0, request: str = "r") -> KvbmPrompt:
    tokens = array("I", range(first, first + 4 * blocks)).tobytes()
    local, sequence = block_hashes(tokens, 4, 0)
    root = root_digest(KEY, "m", "", "", LAYOUT)
    digests = chain_digests(KEY, root, tokens, 4)
    return KvbmPrompt(
        request=request, digests=digests, sequence_hashes=sequence, local=local, salt=0
    )


def content(block: int) -> bytes:
    return bytes([block % 251]) * LAYOUT.block_bytes


def fill(writing: PendingWrite) -> "array[int]":
    for block, offset in zip(writing.blocks, writing.offsets, strict=True):
        writing.arena.view(offset, LAYOUT.block_bytes)[:] = content(block)
    return array("Q", [7 + block for block in writing.blocks])


@pytest_asyncio.fixture
async def start(bus: Bus, limits: StreamLimits, tmp_path: Path) -> AsyncIterator[Start]:
    started: list[SmallKvbm] = []

    async def start_kvbm(**fields: object) -> SmallKvbm:
        kvbm = SmallKvbm(bus, limits, tmp_path, **fields)  # type: ignore[arg-type]
        await kvbm.start()
        started.append(kvbm)
        return kvbm

    yield start_kvbm
    for kvbm in started:
        await kvbm.stop()


@pytest_asyncio.fixture
async def client(bus: Bus, limits: StreamLimits) -> AsyncIterator[KvbmClient]:
    client = KvbmClient(bus, limits, TENANT)
    await client.open()
    yield client
    await client.close()


async def attached(client: KvbmClient, times: int = 1) -> None:
    await eventually(lambda: client.attachments == times and client.key, what="the client attaches")


async def offload(client: KvbmClient, prompt: KvbmPrompt, first: int = 0) -> list[int]:
    async with client.writing(prompt, first) as writing:
        if writing is None:
            return []
        writing.checksums = fill(writing)
        return list(writing.blocks)


async def onboard(client: KvbmClient, prompt: KvbmPrompt, held: int = 0) -> list[tuple[int, int]]:
    """Read blocks and their checksums that the arena holds for these tokens."""
    got: list[tuple[int, int]] = []
    async with aclosing(client.load(prompt, held, TierSpeeds(), 0.0, 10.0)) as parts:
        async for part in parts:
            for i, offset in enumerate(part.offsets):
                view = part.arena.view(offset, LAYOUT.block_bytes)
                assert view == content(part.first + i)
                got.append((part.first + i, part.checksums[i]))
    return got


async def test_offloaded_blocks_are_onboarded_again(client: KvbmClient, start: Start) -> None:
    kvbm = await start()
    await attached(client)
    assert await offload(client, prompt(10)) == list(range(10))
    await eventually(lambda: len(kvbm.blocks) == 10)
    assert await offload(client, prompt(12)) == [10, 11]
    await eventually(lambda: len(kvbm.blocks) == 12)
    assert await onboard(client, prompt(11), held=2) == [(i, 7 + i) for i in range(2, 11)]
    await eventually(lambda: not kvbm.tickets, what="tickets are returned")


class CountingUser:
    """Counts the arenas that it adopts and releases."""

    def __init__(self) -> None:
        self.adopted = 0
        self.released = 0

    async def adopt(self, arena: ArenaView) -> None:
        self.adopted += 1

    async def release(self, arena: ArenaView) -> None:
        self.released += 1


async def test_a_close_during_detachment_detaches_once(
    bus: Bus, limits: StreamLimits, start: Start
) -> None:
    kvbm = await start(silent={Detach})
    users = CountingUser()
    client = KvbmClient(bus, limits, TENANT, users)
    await client.open()
    await attached(client)
    attachment = client._attacher.current
    assert attachment is not None
    client._attacher.lose(attachment, "the test says so")
    await eventually(lambda: kvbm.count(Detach) == 1)
    await client.close()
    assert users.released == users.adopted


async def test_a_growing_prompt_is_sent_as_deltas(client: KvbmClient, start: Start) -> None:
    kvbm = await start()
    await attached(client)
    for end in (100, 103, 110):
        await offload(client, prompt(end))
    await eventually(lambda: len(kvbm.blocks) == 110)
    assert await onboard(client, prompt(120), held=90) == [(i, 7 + i) for i in range(90, 110)]
    sent = [r for r in kvbm.requests if isinstance(r, Offer | Fetch)]
    assert [len(r.sequence_hashes) // 8 for r in sent] == [100, 3, 7, 10]


async def test_a_prompt_that_the_kvbm_lost_is_sent_again(client: KvbmClient, start: Start) -> None:
    kvbm = await start()
    await attached(client)
    assert await offload(client, prompt(100)) == list(range(100))
    await eventually(lambda: len(kvbm.blocks) == 100)
    kvbm.prompts[1] = BlockPromptCache(kvbm.stored_prompts)
    assert await offload(client, prompt(103), first=90) == [100, 101, 102]
    assert [len(r.sequence_hashes) // 8 for r in kvbm.requests if isinstance(r, Offer)] == [
        100,
        3,
        103,
    ]
    assert await offload(client, prompt(104), first=103) == [103]
    assert kvbm.count(Offer) == 4
    assert client.attachments == 1


async def test_without_a_kvbm_a_fetch_returns_nothing_at_once(client: KvbmClient) -> None:
    async with asyncio.timeout(5):
        assert await onboard(client, prompt(3)) == []
        assert await offload(client, prompt(3)) == []
        client.report_computed("r")
    assert client.key is None


async def test_a_kvbm_of_another_node_is_ignored(client: KvbmClient, start: Start) -> None:
    other = await start(node="there", instance="kvbm-0")
    await start()
    await attached(client)
    assert not other.requests


async def test_it_attaches_again_to_a_kvbm_that_lost_the_attachment(
    client: KvbmClient, start: Start
) -> None:
    kvbm = await start()
    await attached(client)
    kvbm.attached.clear()
    assert await onboard(client, prompt(3)) == []
    await attached(client, 2)
    assert await offload(client, prompt(3)) == [0, 1, 2]


async def test_it_follows_the_kvbm_over_a_restart(client: KvbmClient, start: Start) -> None:
    first = await start()
    await attached(client)
    await first.stop()
    await eventually(lambda: client.key is None, what="the loss is detected")
    await start(instance="kvbm-2")
    await attached(client, 2)
    assert await offload(client, prompt(3)) == [0, 1, 2]


async def test_a_missing_reply_ends_the_attachment_without_an_error(
    client: KvbmClient, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.blocks.kvbm_client.REQUEST_S", 0.2)
    kvbm = await start()
    await attached(client)
    assert kvbm.locked(1)
    kvbm.silent = {Fetch}
    assert await onboard(client, prompt(3)) == []
    await attached(client, 2)
    await eventually(lambda: list(kvbm.attached) == [2], what="the old attachment is gone")
    assert kvbm.locked(2)


async def test_a_running_copy_retains_the_old_attachment(client: KvbmClient, start: Start) -> None:
    kvbm = await start()
    await attached(client)
    async with client.writing(prompt(2), 0) as writing:
        assert writing is not None
        known = kvbm.attached.copy()
        kvbm.attached.clear()
        assert await onboard(client, prompt(3)) == []
        assert client.key is None
        kvbm.attached.update(known)
        writing.checksums = fill(writing)
        assert kvbm.locked(1)
    await attached(client, 2)
    await eventually(lambda: len(kvbm.blocks) == 2, what="the copy was committed")


async def test_detachment_waits_for_a_slow_copy(
    client: KvbmClient,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries: list[Attachment] = []
    monkeypatch.setattr(attachment, "QUIET_S", 0.05)
    monkeypatch.setattr(attachment, "LAST_RETRY_S", 0.05)
    unused = Attachment.wait_unused

    async def tried(stay: Attachment) -> None:
        tries.append(stay)
        await unused(stay)

    monkeypatch.setattr(Attachment, "wait_unused", tried)
    kvbm = await start()
    await attached(client)
    async with client.writing(prompt(2), 0) as writing:
        assert writing is not None
        lock = kvbm.folder / kvbm.attached.pop(1).lock
        assert await onboard(client, prompt(3)) == []
        await attached(client, 2)
        await eventually(lambda: len(tries) > 4, what="it is tried again")
    assert caplog.text.count("its arena stays mapped") == 1
    await eventually(lambda: not lock.exists(), what="it is released")


async def test_a_refused_layout_is_not_tried_again(client: KvbmClient, start: Start) -> None:
    kvbm = await start(declines=Declined("layout", "another model of that name is here"))
    await eventually(lambda: kvbm.count(Attach) == 1)
    await start(node="there", instance="kvbm-0")
    assert await onboard(client, prompt(3)) == []
    assert kvbm.count(Attach) == 1


async def test_the_reason_for_a_failed_attachment_is_logged_once(
    client: KvbmClient, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    kvbm = await start(declines=Declined("closing", "it is about to leave"))
    await eventually(lambda: kvbm.count(Attach) == 4, what="it is tried again and again")
    assert len([r for r in caplog.records if "refused this worker" in r.message]) == 1
    assert client.attachments == 0


async def test_cancelled_transfers_leave_no_ticket(client: KvbmClient, start: Start) -> None:
    kvbm = await start()
    await attached(client)
    await offload(client, prompt(8))
    await eventually(lambda: len(kvbm.blocks) == 8)
    for _ in range(5):
        taking = asyncio.create_task(onboard(client, prompt(8)))
        writing = asyncio.create_task(offload(client, prompt(4, first=1000)))
        fetches = kvbm.count(Fetch)
        await eventually(lambda seen=fetches: kvbm.count(Fetch) > seen)  # type: ignore[misc]
        taking.cancel()
        writing.cancel()
        await asyncio.wait([taking, writing])
    await eventually(lambda: not kvbm.tickets, what="tickets are returned")


async def test_corruption_is_reported(client: KvbmClient, start: Start) -> None:
    kvbm = await start()
    await attached(client)
    await offload(client, prompt(4))
    await eventually(lambda: len(kvbm.blocks) == 4)
    async with aclosing(client.load(prompt(4), 0, TierSpeeds(), 0.0, 10.0)) as parts:
        async for part in parts:
            assert isinstance(part, FetchedPart)
            client.report_corrupt(part, prompt(4).digests[32:48])
    await eventually(lambda: kvbm.count(Corrupt) == 1 and len(kvbm.blocks) == 3)
    assert await onboard(client, prompt(4)) == [(0, 7), (1, 8)]


class PromptSource:
    """A source whose items are prompts, all readable by default."""

    def __init__(self) -> None:
        self.held: list[KvbmPrompt] = []
        self.dropped: set[str] = set()
        self.broken: set[str] = set()
        self.copy_allowed = asyncio.Event()
        self.copy_allowed.set()
        self.fails = False

    def hold(self, item: KvbmPrompt, key: bytes) -> KvbmPrompt | None:
        if item.request in self.dropped:
            return None
        if item.request in self.broken:
            raise RuntimeError("the engine is gone")
        self.held.append(item)
        return item

    async def copy(self, item: KvbmPrompt, writing: PendingWrite) -> "array[int]":
        await self.copy_allowed.wait()
        if self.fails:
            raise RuntimeError("the device is gone")
        return fill(writing)

    def release(self, item: KvbmPrompt) -> None:
        self.held.remove(item)

    def drop(self, item: KvbmPrompt) -> None:
        self.dropped.add(item.request)


@pytest_asyncio.fixture
async def source() -> PromptSource:
    return PromptSource()


@pytest_asyncio.fixture
async def writer(
    client: KvbmClient, source: PromptSource
) -> AsyncIterator["WriteThrough[KvbmPrompt]"]:
    writer = WriteThrough(client, source, limit=20)
    writer.start()
    yield writer
    await writer.close()


async def test_queued_blocks_are_written(
    client: KvbmClient, start: Start, writer: "WriteThrough[KvbmPrompt]", source: PromptSource
) -> None:
    kvbm = await start()
    await attached(client)
    assert writer.put("a", prompt(5, request="a"), 0, 5)
    assert writer.put("b", prompt(5, first=100, request="b"), 0, 5)
    writer.end("a")
    await eventually(lambda: writer.written == 10 and writer.idle)
    await eventually(lambda: kvbm.count(Computed) == 1)
    kinds = [type(asked) for asked in kvbm.requests]
    assert kinds.index(Computed) > kinds.index(Commit)
    assert not source.held


async def test_new_blocks_of_a_request_join_its_queued_ones(
    client: KvbmClient, start: Start, writer: "WriteThrough[KvbmPrompt]", source: PromptSource
) -> None:
    kvbm = await start()
    await attached(client)
    source.copy_allowed.clear()
    assert writer.put("a", prompt(2), 0, 2)
    await eventually(lambda: source.held)
    assert writer.put("a", prompt(5), 2, 5)
    assert writer.put("a", prompt(9), 5, 9)
    source.copy_allowed.set()
    await eventually(lambda: writer.written == 9)
    assert [len(o.sequence_hashes) // 8 for o in kvbm.requests if isinstance(o, Offer)] == [2, 9]


async def test_a_full_queue_skips_and_counts(
    client: KvbmClient, start: Start, writer: "WriteThrough[KvbmPrompt]", source: PromptSource
) -> None:
    await start()
    await attached(client)
    source.copy_allowed.clear()
    for name in "ab":
        assert writer.put(name, prompt(8, first=1000 * ord(name), request=name), 0, 8)
    await eventually(lambda: len(source.held) == 2)
    assert writer.put("c", prompt(15), 0, 15)
    assert not writer.put("d", prompt(6), 0, 6)
    assert writer.skipped == 6
    source.copy_allowed.set()
    await eventually(lambda: writer.idle)


async def test_missing_or_unreadable_blocks_are_skipped(
    client: KvbmClient, start: Start, writer: "WriteThrough[KvbmPrompt]", source: PromptSource
) -> None:
    kvbm = await start()
    await attached(client)
    source.dropped.add("a")
    writer.put("a", prompt(3, request="a"), 0, 3)
    await eventually(lambda: writer.idle)
    assert writer.skipped == 3
    source.broken |= {"b1", "b2"}  # one per lane
    for request in source.broken:
        writer.put(request, prompt(3, request=request), 0, 3)
    await eventually(lambda: writer.idle)
    source.fails = True
    writer.put("b", prompt(3, request="b"), 0, 3)
    await eventually(lambda: writer.idle and not kvbm.tickets and kvbm.count(Commit) == 1)
    assert not kvbm.blocks
    assert not source.held
    assert kvbm.count(Finish) == 0
