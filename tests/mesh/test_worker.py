"""A worker on a real bus: work, tokens, events, control, outages, and leaving."""

import asyncio
from array import array
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually
from support.worker import FAST, SALT, SLOW, Crew, Desk, prompt, work

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.ping import ping
from kvmesh.bus.errors import NoResponder, RequestTimeout
from kvmesh.bus.messages import (
    Cancel,
    Clear,
    Drain,
    KvBatch,
    Resend,
    Stored,
    Work,
    WorkReply,
)
from kvmesh.bus.storage.model_files import fetch_model
from kvmesh.bus.streams.configuration import StreamLimits, ensure_streams
from kvmesh.bus.streams.reader import Start, StreamReader
from kvmesh.demo import model_dir
from kvmesh.hashing import block_hashes
from kvmesh.settings import Settings
from kvmesh.settings.schema import MockSettings, WorkerSettings
from kvmesh.worker.engine import EngineContext, EngineError, create_engine


async def test_the_card_describes_the_served_model(
    bus: Bus, crew: Crew, limits: StreamLimits
) -> None:
    worker = WorkerSettings(adapters=["sql"], labels=["zone=a"])
    started = await crew.start(FAST, worker)
    directory = Directory(bus, limits)
    await directory.open()
    (card,) = directory.instances
    assert (card.instance, card.role, card.name, card.engine) == ("w-1", "worker", "w", "mock")
    assert card.labels == {"zone": "a"}
    assert card.node == "", "the mock loads nothing from the node's tiers"
    assert card.model is not None
    assert card.model.adapters == ["sql"]
    assert card.capacity is not None
    assert (card.model.name, card.model.block_size) == ("kvmesh-demo", 16)
    assert card.model.context == card.capacity.blocks * 16 == 4096
    files = await fetch_model(bus, card.model.files)
    assert files["tokenizer.json"] == (model_dir() / "tokenizer.json").read_bytes()
    assert started.node.ready
    await started.node.drain(1)
    await eventually(lambda: directory.instances[0].draining)
    await started.node.close()
    await eventually(lambda: not directory.instances)
    await directory.close()


async def test_tokens_come_in_order_and_again_on_request(desk: Desk, crew: Crew) -> None:
    await crew.start(FAST)
    assert (await desk.offer("w-1", work("a", prompt(40)))).status == "accepted"
    tokens = await desk.done("a")
    assert len(tokens) == 20
    assert desk.chunks["a"][0].cached == [0]
    assert (await desk.control("w-1", Resend("a", 5))).ok
    (again,) = await eventually(
        lambda: [c for c in desk.chunks["a"] if c.offset == 5 and len(c.tokens) == 15]
    )
    assert (again.tokens, again.finish, again.cached) == (tokens[5:], "length", [0])
    assert not (await desk.control("w-1", Resend("b", 0))).ok


async def test_a_prompt_may_be_sent_as_a_delta(desk: Desk, crew: Crew) -> None:
    await crew.start(replace(FAST, blocks=1024))
    assert not (await desk.offer("w-1", work("short", prompt(40)))).stored
    assert (await desk.offer("w-1", work("a", prompt(5000)))).stored
    whole = await _answer(desk, work("b", prompt(5100)))
    rest = work("c", prompt(5100)[4 * 4900 :], base="a", shared=4900)
    assert await _answer(desk, rest) == whole
    gone = await desk.offer("w-1", work("d", b"", base="a", shared=4900))
    assert gone.status == "incomplete"


async def test_many_at_once_are_whole_and_the_prefix_is_reused(desk: Desk, crew: Crew) -> None:
    await crew.start(FAST)
    alone = await _answer(desk, work("alone", prompt(40)))
    replies = [await desk.offer("w-1", work(f"r{i}", prompt(40 + i), 30)) for i in range(20)]
    assert {reply.status for reply in replies} == {"accepted"}
    for i in range(20):
        assert len(await desk.done(f"r{i}")) == 30
    assert desk.tokens("r0")[:20] == alone
    assert desk.chunks["r0"][0].cached == [32]


async def _answer(desk: Desk, item: Work) -> list[int]:
    assert (await desk.offer("w-1", item)).status == "accepted"
    return await desk.done(item.request)


async def test_a_migrated_request_continues_its_answer(desk: Desk, crew: Crew) -> None:
    await crew.start(FAST)
    whole = await _answer(desk, work("whole", prompt(40)))
    longer = prompt(40) + array("I", whole[:8]).tobytes()
    rest = await _answer(desk, work("rest", longer, generated=8))
    assert desk.chunks["rest"][0].offset == 8
    assert rest == whole[8:]


async def test_the_stream_matches_the_cache_under_eviction(desk: Desk, crew: Crew) -> None:
    started = await crew.start(FAST)
    for i in range(60):
        item = work(f"r{i}", prompt(200, first=i % 23), 10)
        assert (await desk.offer("w-1", item)).status == "accepted"
    for i in range(60):
        await desk.done(f"r{i}")
    (load,) = started.node.load()
    assert load.cached_blocks > 200
    held = desk.contents.held
    await eventually(lambda: len(held.get(("w-1", 0), ())) == load.cached_blocks)
    last = {*array("Q", block_hashes(prompt(200, first=59 % 23), 16, SALT)[1])}
    assert last <= held["w-1", 0]
    before = set(held["w-1", 0])
    assert (await desk.dump("w-1", 0)).ok
    await eventually(lambda: desk.contents.dumps == 1)
    await eventually(lambda: held["w-1", 0] == before)
    assert not (await desk.dump("w-1", 1)).ok
    assert (await desk.control("w-1", Clear())).ok
    await eventually(lambda: not held["w-1", 0])


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (work("x", b"12345"), "5 bytes"),
        (work("x", b""), "empty"),
        (work("x", prompt(4096)), "4096 tokens"),
        (work("x", prompt(8), rank=1), "no rank 1"),
        (work("x", prompt(8), adapter="lora"), "no adapter lora"),
        (work("x", prompt(8), generated=8), "8 generated tokens"),
        (work("x", prompt(8), 3, generated=3), "max_tokens is 3"),
    ],
)
async def test_bad_work_is_refused_with_its_reason(
    desk: Desk, crew: Crew, item: Work, reason: str
) -> None:
    await crew.start(FAST)
    reply = await desk.offer("w-1", item)
    assert reply.status == "invalid"
    assert reason in reply.reason
    assert len(await _answer(desk, work("good", prompt(8)))) == 20


async def test_malformed_work_and_commands_are_answered(bus: Bus, desk: Desk, crew: Crew) -> None:
    await crew.start(FAST)
    reply = await bus.request(
        bus.subjects.work("w-1"), {"request": 3}, msgspec.msgpack.Decoder(WorkReply), PATIENCE_S
    )
    assert reply.status == "invalid"
    assert not (await desk.control("w-1", {"type": "nonsense"})).ok
    assert not (await desk.control("w-1", {"type": "ping"})).ok
    await ping(bus, "w-1", PATIENCE_S)


async def test_too_many_waiting_is_busy(desk: Desk, crew: Crew) -> None:
    mock = MockSettings(blocks=256, max_sequences=1)
    await crew.start(mock, WorkerSettings(max_waiting=2))
    replies = [await desk.offer("w-1", work(f"r{i}", prompt(40), 400)) for i in range(6)]
    statuses = [reply.status for reply in replies]
    assert statuses[:2] == ["accepted", "accepted"]
    assert statuses[-1] == "busy"


async def test_cancel_stops_the_engine_and_frees_its_blocks(desk: Desk, crew: Crew) -> None:
    started = await crew.start(SLOW)
    await desk.offer("w-1", work("a", prompt(40), 3000))
    await eventually(lambda: len(desk.chunks.get("a", [])) > 2)
    assert (await desk.control("w-1", Cancel("a"))).ok
    assert await eventually(lambda: desk.finish("a")) == "abort"
    (load,) = started.node.load()
    assert (load.running, load.active_blocks, load.aborted) == (0, 0, 1)
    assert not (await desk.control("w-1", Cancel("a"))).ok


async def test_load_reports_running_and_waiting_requests(desk: Desk, crew: Crew) -> None:
    await crew.start(SLOW)
    await desk.offer("w-1", work("a", prompt(40), 200))
    await eventually(lambda: any(load.running == 1 for load in desk.loads))
    await desk.control("w-1", Cancel("a"))
    (last,) = await eventually(lambda: [load for load in desk.loads[-1:] if load.aborted])
    assert (last.instance, last.rank, last.requests, last.prompt_tokens) == ("w-1", 0, 1, 40)
    assert last.total_blocks == 256
    assert last.output_tokens > 0


async def test_a_drained_worker_finishes_its_work_and_takes_no_more(desk: Desk, crew: Crew) -> None:
    started = await crew.start(SLOW)
    await desk.offer("w-1", work("a", prompt(40), 60))
    await eventually(lambda: desk.chunks.get("a"))
    drained = asyncio.create_task(started.node.drain(30))
    await eventually(lambda: started.node.draining)
    assert (await desk.offer("w-1", work("b", prompt(8)))).status == "draining"
    await drained
    assert len(await desk.done("a")) == 60
    await started.node.close()

    async def gone() -> bool:  # the server may not have read the last words yet
        with suppress(RequestTimeout):
            await desk.offer("w-1", work("c", prompt(8)), timeout=2)
        return False

    with pytest.raises(NoResponder):
        await eventually(gone)


async def test_requests_that_outlast_the_drain_are_handed_back(desk: Desk, crew: Crew) -> None:
    started = await crew.start(SLOW)
    await desk.offer("w-1", work("a", prompt(40), 3000))
    await eventually(lambda: desk.chunks.get("a"))
    await started.node.drain(0.05)
    assert await eventually(lambda: desk.finish("a")) == "abort"


async def test_the_drain_command_ends_the_node(desk: Desk, crew: Crew) -> None:
    started = await crew.start(FAST)
    assert (await desk.control("w-1", Drain())).ok
    assert started.ends == [None]


async def test_a_model_folder_without_files_is_a_clear_error(crew: Crew, tmp_path: Path) -> None:
    settings = Settings()
    engine = create_engine(EngineContext(settings, tmp_path))
    with pytest.raises(EngineError, match=str(tmp_path)):
        await engine.start(None)  # type: ignore[arg-type]


async def test_no_event_is_lost_while_the_server_is_away(
    desk: Desk, crew: Crew, nats_server: NatsServer
) -> None:
    started = await crew.start(FAST)
    await _answer(desk, work("before", prompt(100)))
    await desk.offer("w-1", work("during", prompt(100, first=3), 2000))
    await eventually(lambda: desk.chunks.get("during"))
    nats_server.restart()
    await eventually(lambda: started.bus.connected and desk.bus.connected)
    await eventually(lambda: not started.node.load()[0].running)
    (load,) = started.node.load()
    held = desk.contents.held["w-1", 0]
    await eventually(lambda: len(held) == load.cached_blocks)
    await ensure_streams(desk.bus, StreamLimits(lease_s=1.0))


async def test_stored_blocks_carry_the_prompts_own_hashes(desk: Desk, crew: Crew) -> None:
    await crew.start(FAST)
    seen: list[Stored] = []
    reader = StreamReader(
        desk.bus,
        desk.bus.subjects.kv_stream,
        desk.bus.subjects.kv_all,
        lambda m: seen.extend(
            e for e in msgspec.msgpack.decode(m.data, type=KvBatch).events if isinstance(e, Stored)
        ),
        Start(),
    )
    await reader.open()
    await _answer(desk, work("a", prompt(40), 1))
    (event,) = await eventually(lambda: seen)
    local, sequence = block_hashes(prompt(40), 16, SALT)
    assert (event.tier, event.parent, event.salt) == (0, None, SALT)
    assert (event.local, event.engine) == (local, sequence)
    await reader.close()
