"""The disk tier of a block manager: used, full, broken, smaller, and after a restart."""

import os
import resource
import signal
import time
from pathlib import Path

from support.kvbm import layout, tokens
from support.kvbm_node import ALL_TO_DISK, DISK_BYTES, HOST_BYTES, Node
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.messages import (
    Await,
    Clear,
    Declined,
    Done,
    ExpectReturns,
    Finish,
    ReturnForecast,
)
from kvmesh.kvbm.core.blocks.journal_record import BlockWritten
from kvmesh.kvbm.tiers.disk_journal import records_in
from kvmesh.returns.rates import BINS, pack_rates

# use


async def test_a_prompt_is_loaded_from_disk(node: Node) -> None:
    await node.start(**ALL_TO_DISK)
    worker = await node.worker()
    names = worker.names(tokens(100))
    await worker.put(names)
    await node.on_disk(100)
    await node.control(Clear(tiers=[1]))
    taken = await worker.get(names)
    assert (taken.tiers, taken.bad) == ([2] * 100, 0)
    assert (await worker.get(names)).tiers == [1] * 100


async def test_more_than_memory_holds_goes_to_disk_and_back(node: Node) -> None:
    await node.start(**ALL_TO_DISK)
    worker = await node.worker()
    prompts = [worker.names(tokens(60, seed)) for seed in range(16)]
    for number, names in enumerate(prompts, 1):
        await worker.put(names)
        await node.on_disk(60 * number)
    for names in prompts:
        taken = await worker.get(names)
        assert (len(taken.blocks), taken.bad) == (60, 0)
    assert node.metric("used_bytes", 'tier="1"') <= HOST_BYTES


async def test_only_reused_blocks_are_offloaded_to_disk(node: Node) -> None:
    await node.start()
    worker = await node.worker()
    once, twice = worker.names(tokens(8, 1)), worker.names(tokens(8, 2))
    await worker.put(once)
    await worker.put(twice)
    await worker.get(twice)
    await node.on_disk(8)
    await node.control(Clear(tiers=[1]))
    assert not (await worker.get(once)).blocks
    assert len((await worker.get(twice)).blocks) == 8


async def test_a_prompt_that_is_expected_is_loaded_before_it_returns(node: Node) -> None:
    await node.start(**ALL_TO_DISK)
    worker = await node.worker()
    names = worker.names(tokens(60))
    await worker.put(names, request="r")
    await node.on_disk(60)
    await node.control(Clear(tiers=[1]))
    forecast = ReturnForecast("r", 0, time.time(), pack_rates([1.0] * BINS))
    await node.expect(ExpectReturns([forecast]))
    size = 60 * layout().block_bytes
    await node.wait_for_metric("restored_bytes", size)
    await node.wait_for_metric("moving_blocks", 0)
    assert (await worker.get(names)).tiers == [1] * 60
    await node.wait_for_metric("restored_read_bytes", size)
    status = (await node.mesh.command("status")).stdout
    assert "restores before returns: trial" in " ".join(status.split())


async def test_a_corrupt_block_is_dropped(node: Node, tmp_path: Path) -> None:
    await node.start(**ALL_TO_DISK)
    worker = await node.worker()
    names = worker.names(tokens(10))
    await worker.put(names)
    await node.on_disk(10)
    await node.control(Clear(tiers=[1]))
    corrupt_block(tmp_path / "disk" / "blocks", names.digest(4))
    assert len((await worker.get(names)).blocks) == 4
    await node.wait_for_metric("corrupt_blocks", 1)
    assert await worker.put(names) == 1
    assert len((await worker.get(names)).blocks) == 10


def corrupt_block(file: Path, digest: bytes) -> None:
    """Change one byte of the block that is filled with `digest`."""
    data = file.read_bytes()
    with file.open("r+b") as opened:
        opened.seek(data.index(digest) + 5)
        opened.write(bytes([digest[5] ^ 1]))
        os.fsync(opened.fileno())


async def test_a_worker_reports_a_corrupt_block(node: Node) -> None:
    await node.start()
    worker = await node.worker()
    names = worker.names(tokens(10))
    await worker.put(names)
    fetched = await worker.fetch(names)
    await worker.corrupt(fetched.ticket, names.digest(6))
    assert len((await worker.get(names)).blocks) == 6
    await worker.request(Finish(worker.id, fetched.ticket), Done)
    await node.wait_for_metric("corrupt_blocks", 1)


async def test_a_full_disk_keeps_its_blocks(node: Node) -> None:
    await node.start(**ALL_TO_DISK)
    worker = await node.worker()
    first = worker.names(tokens(100, 1))
    await worker.put(first)
    await node.on_disk(100)
    process = node.mesh.processes["kv"]
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (5 << 20, 5 << 20))
    for seed in range(2, 12):
        await worker.put(worker.names(tokens(100, seed)))
        await node.wait_for_metric("moving_blocks", 0)
    assert (await node.control(Clear(model="other"))).ok
    assert node.log.count("the disk tier stays at") == 1
    assert node.metric("capacity_bytes", 'tier="2"') < DISK_BYTES
    last = worker.names(tokens(100, 11))
    await node.control(Clear(tiers=[1]))
    taken = await worker.get(last)
    assert (len(taken.blocks), taken.bad) == (100, 0)


# deaths


async def journaled(tmp_path: Path, blocks: int) -> None:
    """Wait until the journal records this many blocks."""
    journal = tmp_path / "disk" / "journal"

    def written() -> bool:
        records = records_in(journal.read_bytes())
        return sum(isinstance(record, BlockWritten) for record in records) >= blocks

    await eventually(written, what="the journal is written")


async def test_a_killed_kvbm_restores_its_disk(node: Node, tmp_path: Path) -> None:
    first = await node.start(**ALL_TO_DISK)
    worker = await node.worker()
    names = worker.names(tokens(30))
    await worker.put(names)
    await node.on_disk(30)
    await journaled(tmp_path, 30)
    half_done = await worker.fetch(names)
    arena = worker.attached and worker.attached.arena
    assert half_done.ticket
    second = await node.restart()
    assert second.store is not None
    assert second.store.models == ["m"]
    assert second.name == first.name
    left = [path.name for path in (tmp_path / "node").glob("arena-*")]
    assert len(left) == 1
    assert left != [arena]
    again = await node.worker()
    taken = await again.get(names)
    assert (taken.tiers, taken.bad) == ([2] * 30, 0)
    worker.card = second
    declined = await worker.request(Await(worker.id + 100, half_done.ticket, 0.0), Declined)
    assert declined.code == "unknown"


async def test_leaving_during_moves_logs_no_errors(node: Node) -> None:
    await node.start(**ALL_TO_DISK)
    worker = await node.worker()
    process = node.mesh.processes["kv"]
    for seed in range(4):
        await worker.put(worker.names(tokens(100, seed)))
    node.mesh.kill("kv", signal.SIGTERM)
    assert process.returncode == 0
    assert not [word for word in ("Traceback", "failed") if word in node.log]


def test_an_unreadable_journal_is_reported(node: Node, tmp_path: Path) -> None:
    (tmp_path / "disk" / "journal").mkdir(parents=True)
    node.mesh.start("kvbm", "kv")
    assert node.mesh.processes["kv"].wait(PATIENCE_S) == 2
    assert "journal: Is a directory; set kvbm.disk_path" in node.log
    assert "Traceback" not in node.log


async def test_a_false_journal_is_harmless(node: Node, tmp_path: Path) -> None:
    await node.start(**ALL_TO_DISK)
    worker = await node.worker()
    names = worker.names(tokens(30))
    await worker.put(names)
    await node.on_disk(30)
    await journaled(tmp_path, 30)
    node.mesh.kill("kv")
    blocks = tmp_path / "disk" / "blocks"
    blocks.write_bytes(bytes(blocks.stat().st_size))
    with (tmp_path / "disk" / "journal").open("ab") as journal:
        journal.write(b"half a reco")
    node.mesh.restart("kv")
    await node.wait_for_card()
    again = await node.worker()
    assert not (await again.get(names)).blocks
    assert await again.put(names) == 30


# sizes


async def test_a_smaller_tier_keeps_blocks_that_fit(node: Node, tmp_path: Path) -> None:
    await node.start(KVMESH_KVBM_DISK_BYTES=str(256 << 20), **ALL_TO_DISK)
    worker = await node.worker()
    first, last = worker.names(tokens(500, 1)), worker.names(tokens(500, 2))
    for count, names in enumerate((first, last), 1):
        while await worker.put(names):
            pass
        await node.on_disk(500 * count)
    await journaled(tmp_path, 1000)
    assert (tmp_path / "disk" / "blocks").stat().st_size == 16 << 20
    await node.restart(KVMESH_KVBM_DISK_BYTES=str(6 << 20))
    assert (tmp_path / "disk" / "blocks").stat().st_size == 6 << 20
    left = int(node.metric("blocks", 'tier="2"'))
    assert 700 < left <= (6 << 20) // 8192
    again = await node.worker()
    taken = await again.get(first)
    assert (taken.tiers, taken.bad) == ([2] * 500, 0)
    assert await again.put(again.names(tokens(100, 3))) == 100
    await node.wait_for_metric("moving_blocks", 0)
    assert node.metric("used_bytes", 'tier="2"') <= 6 << 20


async def test_disk_space_that_others_need_is_freed(node: Node, tmp_path: Path) -> None:
    await node.start(**ALL_TO_DISK)
    worker = await node.worker()
    names = worker.names(tokens(100))
    await worker.put(names)
    await node.on_disk(100)
    await journaled(tmp_path, 100)
    await node.restart(KVMESH_KVBM_DISK_FREE_BYTES=str(1 << 60))
    await node.wait_for_metric("blocks", 0, 'tier="2"')
    blocks = tmp_path / "disk" / "blocks"
    await eventually(lambda: blocks.stat().st_size == 0, what="the file is cut")
    assert "100 blocks dropped" in node.log
    again = await node.worker()
    assert await again.put(names) == 100
    assert (await again.get(names)).tiers == [1] * 100
