"""The kvbm process with its workers: sharing, deaths, bad disks and bad settings."""

import asyncio
import signal
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from support.kvbm import SALT, SIZE, Names, TestWorker, find_kvbm, layout, tokens
from support.kvbm_node import ALL_TO_DISK, DISK_BYTES, HOST_BYTES, Node
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import NoResponder
from kvmesh.bus.messages import (
    Await,
    Clear,
    Commit,
    ControlReply,
    Detach,
    Done,
    Fetched,
    Finish,
    Incomplete,
    Instance,
    KvLayout,
    MessageDecoder,
    Offer,
    OverlapQuery,
    OverlapReply,
    Pin,
    Release,
    Retain,
    Unpin,
)

# sharing


async def test_other_workers_load_what_one_writes(node: Node) -> None:
    await node.start()
    one, other = await node.worker(), await node.worker()
    names = one.names(tokens(40))
    assert await one.put(names) == 40
    assert await other.put(names) == 0
    taken = await other.get(names)
    assert taken.tiers == [1] * 40
    assert (await other.get(names, held=30)).tiers == [1] * 10
    longer = other.names(tokens(44))
    assert len((await other.get(longer)).blocks) == 40
    assert not (await other.get(other.names(tokens(40), tenant="t"))).blocks


async def test_a_prompt_may_be_sent_as_a_delta(node: Node) -> None:
    card = await node.start()
    one, other = await node.worker(), await node.worker()
    names = one.names(tokens(80))
    assert await one.put(names.prefix(70)) == 70
    assert await one.put(names, first=70, **names.after(66, of=70)) == 10
    assert (await one.get(names, **names.after(80, of=80))).tiers == [1] * 80
    empty = Offer(other.id, 70, b"", b"", b"", SALT)
    offer = msgspec.structs.replace(empty, **names.after(70, of=70))
    reply = await node.bus.request(
        node.bus.subjects.kvbm(card.instance), offer, MessageDecoder(Incomplete), 10
    )
    assert reply == Incomplete()
    assert (await other.get(names)).tiers == [1] * 80


async def test_a_prefix_is_computed_once(node: Node) -> None:
    await node.start()
    one, other = await node.worker(), await node.worker()
    names = one.names(tokens(20))
    assert not (await one.get(names, request="first")).blocks
    waiting = asyncio.create_task(other.get(names, request="second", wait_s=30.0))
    await node.wait_for_metric("waits", 1)
    assert await one.put(names.prefix(12)) == 12
    assert await one.put(names, 12) == 8
    assert len((await waiting).blocks) == 20


async def test_waiting_ends_when_a_worker_stops_computing(node: Node) -> None:
    await node.start()
    one, other, third = await node.worker(), await node.worker(), await node.worker()
    names = one.names(tokens(20))
    await one.get(names, request="first")
    waiting = asyncio.create_task(other.get(names, request="second", wait_s=30.0))
    await node.wait_for_metric("waits", 1)
    queued = asyncio.create_task(third.get(names, request="third", wait_s=30.0))
    await node.wait_for_metric("waits", 2)
    await one.computed("first")
    assert not (await waiting).blocks
    assert await other.put(names) == 20
    assert len((await queued).blocks) == 20


async def test_a_parked_fetch_is_answered_when_its_ticket_ends(node: Node) -> None:
    await node.start()
    first, second = await node.worker(), await node.worker()
    names = first.names(tokens(8))
    assert await first.put(names.prefix(4)) == 4
    await first.get(names, request="r1")
    fetched = await second.fetch(names, request="r2", wait_s=600.0)
    assert fetched.pending == 4
    prompt_bytes = node.metric("requests_total")
    waiting = asyncio.create_task(second.request(Await(second.id, fetched.ticket, 600.0), Fetched))
    await node.wait_for_metric("requests_total", prompt_bytes + 1)
    await second.request(Finish(second.id, fetched.ticket), Done)
    with pytest.raises(AssertionError, match="the ticket has ended"):
        await waiting


async def test_the_index_receives_events_of_every_tier(node: Node) -> None:
    node.mesh.start("indexer", "indexer-0")
    card = await node.start(**ALL_TO_DISK)
    worker = await node.worker()
    names = worker.names(tokens(16))
    await worker.put(names)
    await node.on_disk(16)

    async def eventually_tiers(*expected: int) -> None:
        async def tiers() -> bool:
            found = await overlap(node.bus, names)
            return found == ({card.instance: expected} if expected else {})

        await eventually(tiers, what=f"tiers {expected}")

    await eventually_tiers(0, 16, 0, 0)
    assert (await node.control(Clear(tiers=[1]))).blocks == 16
    await eventually_tiers(0, 0, 16, 0)
    await worker.get(names.prefix(6))
    await eventually_tiers(0, 6, 10, 0)
    assert (await node.dump(0)).ok
    assert not (await node.dump(1)).ok
    await eventually_tiers(0, 6, 10, 0)
    await node.control(Clear(salt=SALT))
    await eventually_tiers()


async def test_the_index_remembers_why_a_tier_dropped_blocks(node: Node) -> None:
    node.mesh.start("indexer", "indexer-0")
    await node.start(KVMESH_KVBM_HOST_BYTES=str(128 * layout().block_bytes))
    worker = await node.worker()
    old, new = worker.names(tokens(16, 1)), worker.names(tokens(120, 2))
    await worker.put(old, request="old")

    async def eventually_removed(names: Names, *expected: object) -> None:
        async def removed() -> bool:
            reply = await ask_index(node.bus, names)
            removals = next(iter(reply.removals), []) if reply is not None else []
            return [(r.tier, r.reason, r.request) for r in removals] == [expected]

        await eventually(removed, what=f"removal {expected}")

    for end in range(8, 128, 8):
        await worker.put(new.prefix(end), first=end - 8, request="new")
    await eventually_removed(old, 1, "evicted", "new")
    assert (await node.control(Clear())).ok
    await eventually_removed(new, 1, "cleared", None)


async def ask_index(bus: Bus, names: Names) -> OverlapReply | None:
    """The index's reply about a prompt; None until the index answers."""
    query, replies = OverlapQuery([names.sequence]), MessageDecoder(OverlapReply)
    try:
        return await bus.request(bus.subjects.index("m"), query, replies, PATIENCE_S)
    except NoResponder:
        return None


async def overlap(bus: Bus, names: Names) -> dict[str, tuple[int, ...]]:
    """Overlap of each instance with a prompt, by tier; empty until the index answers."""
    reply = await ask_index(bus, names)
    if reply is None:
        return {"": ()}
    rows = struct.iter_unpack("<5I", reply.rows[0])
    return {reply.ranks[rank].instance: tuple(tiers) for rank, *tiers in rows}


async def test_commands(node: Node) -> None:
    await node.start()
    worker = await node.worker()
    a, b = worker.names(tokens(8, 1)), worker.names(tokens(8, 2))
    shared = [Retain(0, 4 * SIZE, 80, explicit=True)]
    await worker.put(a, session="a", retention=shared)
    await worker.put(b, session="b")
    pinned = Pin(id="p", sequence_hashes=b.sequence[:32], ttl_s=60.0)
    assert await node.control(pinned) == ControlReply(True, blocks=4)
    assert await node.control(Release(sessions=["a"])) == ControlReply(True, blocks=8)
    assert await node.control(Release(sessions=["b"])) == ControlReply(True, blocks=4)
    assert len((await worker.get(b)).blocks) == 4
    assert await node.control(Unpin("p")) == ControlReply(True, blocks=4)
    assert await node.control(Unpin("p")) == ControlReply(True, blocks=0)  # it is as wanted
    assert await node.control(Clear(model="other")) == ControlReply(True, blocks=0)
    assert await node.control(Clear(SALT, [3], "m")) == ControlReply(True, blocks=0)
    await node.wait_for_metric(
        "moving_blocks", 0
    )  # `Clear` passes over blocks on their way to the disk
    assert await node.control(Clear(model="m")) == ControlReply(True, blocks=4)
    assert "cleared 0 blocks: everything of other, tiers: all" in node.log
    assert f"cleared 0 blocks: namespace {SALT:016x} of m, tiers: 3" in node.log
    assert "cleared 4 blocks: everything of m, tiers: all" in node.log


async def test_sub_tenants_share_the_budget_of_their_tenant(node: Node) -> None:
    await node.start(KVMESH_KVBM_TENANT_SHARE="0.25")
    worker = await node.worker()
    share, retention = HOST_BYTES // 4, [Retain(0, 100 * SIZE, 80, explicit=True)]

    async def put_retained(tenant: str, seed: int) -> float:
        names = worker.names(tokens(100, seed), tenant)
        assert await worker.put(names, tenant=tenant, retention=retention) == 100
        return node.metric("retained_bytes", 'tier="1"')

    prompt_bytes = 100 * layout().block_bytes
    assert await put_retained("a/one", 1) == prompt_bytes
    assert await put_retained("a/two", 2) == share
    assert await put_retained("a", 3) == share
    assert await put_retained("b/one", 4) == share + prompt_bytes


async def test_retention_is_inherited(node: Node) -> None:
    await node.start()
    worker = await node.worker()
    names = worker.names(tokens(6))
    await worker.put(names, retention=[Retain(0, 4 * SIZE, 80, 100.0, explicit=True)])
    fetched = await worker.fetch(names)
    (retain,) = fetched.retention
    assert (retain.start, retain.end, retain.priority) == (0, 4 * SIZE, 80)
    assert retain.ttl_s is not None
    assert 0 < retain.ttl_s <= 100


# deaths


def victim(node: Node, act: str) -> "subprocess.Popen[bytes]":
    """A worker in its own process that holds a ticket."""
    command = [sys.executable, "-m", "support.kvbm", node.mesh.nats_url, node.mesh.namespace, act]
    tests = Path(__file__).parents[1]
    return subprocess.Popen(command, cwd=tests, stdout=subprocess.PIPE)


async def ticket_of(process: "subprocess.Popen[bytes]") -> int:
    assert process.stdout is not None
    return int(await asyncio.to_thread(process.stdout.readline))


@pytest.mark.parametrize("act", ["offer", "fetch"])
async def test_a_dead_workers_tickets_are_reclaimed(node: Node, act: str) -> None:
    await node.start()
    worker = await node.worker()
    await worker.put(worker.names(tokens(8, 1)))
    process = victim(node, act)
    with process:
        assert await ticket_of(process)
        await node.wait_for_metric("workers", 2)
        held = node.metric("write_tickets") + node.metric("read_tickets")
        process.send_signal(signal.SIGKILL)
    assert held == 1
    await node.wait_for_metric("workers", 1)
    await node.wait_for_metric("write_tickets", 0)
    await node.wait_for_metric("read_tickets", 0)
    await node.control(Clear())
    assert node.metric("used_bytes") == 0
    assert await worker.put(worker.names(tokens(8, 77))) == 8


async def test_a_leaving_kvbm_refuses_new_work(node: Node, tmp_path: Path) -> None:
    await node.start()
    worker = await node.worker()
    names = worker.names(tokens(8))
    await worker.put(names)
    node.mesh.kill("kv", signal.SIGTERM)
    assert node.mesh.processes == {}
    assert [path.name for path in (tmp_path / "node").iterdir()] == [f"{worker.name}.lock"]


async def test_nothing_is_left_in_shared_memory(node: Node) -> None:
    del node.mesh.env["KVMESH_KVBM_DIRECTORY"]
    killed = await node.start(KVMESH_KVBM_NODE="one")
    node.mesh.kill("kv")
    second = await node.start(KVMESH_KVBM_NODE="two")
    assert [has_directory(card) for card in (killed, second)] == [False, True]
    node.mesh.kill("kv", signal.SIGTERM)
    assert not has_directory(second)


def has_directory(card: Instance) -> bool:
    assert card.store is not None
    return Path(card.store.directory).is_dir()


# settings


async def test_a_block_that_is_too_large_is_refused(node: Node) -> None:
    await node.start()
    with pytest.raises(AssertionError, match="cannot hold a block of 8388608 bytes"):
        await node.worker(layout(8 << 20))


async def test_blocks_without_bytes_are_refused(node: Node) -> None:
    await node.start()
    for shape in (replace(layout(), layers=[]), replace(layout(), block_size=0)):
        with pytest.raises(AssertionError, match="no tokens or no bytes"):
            await node.worker(shape)
    worker = await node.worker()
    assert await worker.put(worker.names(tokens(2))) == 2


@pytest.mark.parametrize("shape", [layout(weights="v"), layout(16384)], ids=["weights", "size"])
async def test_differing_layouts_share_nothing_and_are_logged(node: Node, shape: KvLayout) -> None:
    await node.start()
    one = await node.worker()
    assert await one.put(one.names(tokens(8))) == 8
    for blocks in (8, 0):
        other = await node.worker(shape)
        assert len((await other.get(other.names(tokens(8)))).blocks) == 8 - blocks
        assert await other.put(other.names(tokens(8))) == blocks
    assert (await one.get(one.names(tokens(8)))).bad == 0
    (line,) = [line for line in node.log.splitlines() if "differ in weights" in line]
    assert all(known.summary in line for known in (shape, layout()))


async def test_the_card_has_the_capacity_in_blocks(node: Node) -> None:
    await node.start()
    for block_bytes in (8192, 4096):
        await node.worker(layout(block_bytes))

        async def reports_blocks(size: int = block_bytes) -> bool:
            store = (await find_kvbm(node.bus, node.limits)).store
            assert store is not None
            return store.tier_blocks == [HOST_BYTES // size, DISK_BYTES // size, 0]

        await eventually(reports_blocks, what="the card has changed")


async def test_a_disk_that_is_too_small_is_not_used_and_logged(node: Node) -> None:
    await node.start(KVMESH_KVBM_DISK_BYTES=str(1 << 20), **ALL_TO_DISK)
    for _ in range(2):
        worker = await node.worker(layout(2 << 20))
        await worker.put(worker.names(tokens(1)))
    assert len((await worker.get(worker.names(tokens(1)))).blocks) == 1
    assert node.log.count("tier 2 is not used for m: a tier of 1048576 bytes cannot hold") == 1
    assert node.log.count("kvbm.disk_bytes is less than kvbm.host_bytes") == 1


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"KVMESH_KVBM_DIRECTORY": "/proc/none"}, "set kvbm.directory"),
        ({"KVMESH_KVBM_HOST_BYTES": str(1 << 50)}, "kvbm.host_bytes is"),
        ({"KVMESH_KVBM_DISK_PATH": "/proc/none"}, "set kvbm.disk_path"),
        ({"KVMESH_KVBM_DISK_FREE_BYTES": str(1 << 50)}, "set kvbm.disk_path"),
        ({"KVMESH_KVBM_KEY": "abc"}, "64 hexadecimal digits"),
        ({"KVMESH_KVBM_RETENTION": "tool"}, "KIND=PRIORITY"),
    ],
)
def test_bad_settings_are_refused(node: Node, env: dict[str, str], reason: str) -> None:
    node.mesh.start("kvbm", "kv", **env)
    assert node.mesh.processes["kv"].wait(PATIENCE_S) == 2
    assert reason in node.log
    assert "Traceback" not in node.log


async def test_one_kvbm_per_directory(node: Node) -> None:
    await node.start()
    node.mesh.start("kvbm", "second")
    assert node.mesh.processes["second"].wait(PATIENCE_S) == 1
    assert "another kvbm uses" in (node.mesh.folder / "second.log").read_text()


async def test_a_worker_without_a_lock_is_refused(node: Node) -> None:
    card = await node.start()
    worker = TestWorker(node.bus, card, layout())
    worker.close()
    with pytest.raises(AssertionError, match="not a locked file"):
        await worker.attach()


async def test_attachment_numbers_cannot_be_guessed(node: Node) -> None:
    card = await node.start()
    worker = await node.worker()
    stranger = TestWorker(node.bus, card, layout())
    stranger.close()
    for number in (*range(1, 20), worker.id - 1, worker.id + 1):
        with pytest.raises(AssertionError, match="no such attachment"):
            await stranger.request(Detach(number), Done)
    second = await node.worker()
    assert abs(second.id - worker.id) > 1 << 20
    assert (await worker.fetch(worker.names(tokens(4)))).ticket == 0


async def test_invalid_messages_are_declined(node: Node) -> None:
    await node.start()
    worker = await node.worker()
    names = worker.names(tokens(4))
    torn = Names(names.digests[:-1], names.sequence, names.local)
    with pytest.raises(AssertionError, match="not of the same blocks"):
        await worker.fetch(torn)
    with pytest.raises(AssertionError, match="no such ticket"):
        await worker.request(Await(worker.id, 999, 0.0), Fetched)
    other = await node.worker()
    wanted = await worker.offer(names)
    with pytest.raises(AssertionError, match="no such ticket"):
        await other.request(Finish(other.id, wanted.ticket), Done)
    with pytest.raises(AssertionError, match="not a multiple"):
        await worker.request(Commit(worker.id, wanted.ticket, b"odd"), Done)
    sums = worker.write(names, wanted)
    assert (await worker.request(Commit(worker.id, wanted.ticket, sums), Done)).blocks == 4
