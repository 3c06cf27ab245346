"""A worker on a real bus: work, tokens, events, control, outages, and leaving."""

import asyncio
from array import array
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually
from support.worker import FAST, SALT, SLOW, ScriptedFrontend, Workers, prompt, work

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.discovery.ping import ping
from kvmesh.bus.discovery.worker_reports import follow_starts
from kvmesh.bus.errors import NoResponder, RequestTimeout
from kvmesh.bus.messages import (
    Cancel,
    Clear,
    Drain,
    Instance,
    KvBatch,
    MessageDecoder,
    Resend,
    Starting,
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
from kvmesh.worker.health.membership import Membership


async def test_the_card_describes_the_served_model(
    bus: Bus, workers: Workers, limits: StreamLimits
) -> None:
    worker = WorkerSettings(adapters=["sql"], labels=["zone=a"])
    started = await workers.start(FAST, worker)
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


async def test_a_worker_tells_its_phases_until_it_has_joined(
    bus: Bus, workers: Workers, limits: StreamLimits
) -> None:
    told: list[Starting] = []
    subscription = await follow_starts(bus, told.append)
    started = await workers.start(replace(FAST, startup_s=0.2), WorkerSettings())
    assert started.node.ready
    directory = Directory(bus, limits)
    await directory.open()
    (card,) = directory.instances
    took = {phase.name: phase.seconds for phase in card.phases}
    assert list(took) == ["configuration", "weights", "engine", "registration", "routable"]
    assert took["weights"] == pytest.approx(0.2, abs=0.1)
    assert sum(took.values()) <= card.startup_s + 0.01
    await eventually(lambda: told and told[-1].phase == "routable")
    seen = [phase for phase, _ in groupby(each.phase for each in told) if phase != "engine"]
    assert seen == ["configuration", "weights", "registration", "routable"]
    first, last = told[0], told[-1]
    assert (first.instance, first.model, first.engine) == ("w-1", "kvmesh-demo", "mock")
    assert [each.started for each in told] == [first.started] * len(told)
    assert {phase.name for phase in last.phases} == set(took) - {"routable"}
    await directory.close()
    await subscription.unsubscribe()


async def test_a_worker_is_ready_only_once_its_lease_can_be_read(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    present, seen = Membership._present, asyncio.Event()

    async def stale(membership: Membership) -> list[Instance]:
        """A replica that lags behind the one which stored the lease."""
        cards = await present(membership)
        if cards:
            seen.set()
        return cards if lagging.is_set() else []

    lagging = asyncio.Event()
    monkeypatch.setattr(Membership, "_present", stale)
    starting = asyncio.create_task(workers.start(FAST))
    await seen.wait()
    node = workers.started[0].node
    assert not node.ready
    assert not starting.done()
    lagging.set()
    await starting
    assert node.ready


async def test_tokens_come_in_order_and_again_on_request(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    await workers.start(FAST)
    assert (await frontend.dispatch("w-1", work("a", prompt(40)))).status == "accepted"
    tokens = await frontend.done("a")
    assert len(tokens) == 20
    assert frontend.chunks["a"][0].cached == [0]
    assert (await frontend.control("w-1", Resend("a", 5))).ok
    (again,) = await eventually(
        lambda: [c for c in frontend.chunks["a"] if c.offset == 5 and len(c.tokens) == 15]
    )
    assert (again.tokens, again.finish, again.cached) == (tokens[5:], "length", [0])
    assert not (await frontend.control("w-1", Resend("b", 0))).ok


async def test_a_prompt_may_be_sent_as_a_delta(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    await workers.start(replace(FAST, blocks=1024))
    assert not (await frontend.dispatch("w-1", work("short", prompt(40)))).stored
    assert (await frontend.dispatch("w-1", work("a", prompt(5000)))).stored
    whole = await _answer(frontend, work("b", prompt(5100)))
    rest = work("c", prompt(5100)[4 * 4900 :], base="a", shared=4900)
    assert await _answer(frontend, rest) == whole
    gone = await frontend.dispatch("w-1", work("d", b"", base="a", shared=4900))
    assert gone.status == "incomplete"


async def test_many_at_once_are_whole_and_the_prefix_is_reused(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    await workers.start(FAST)
    alone = await _answer(frontend, work("alone", prompt(40)))
    replies = [await frontend.dispatch("w-1", work(f"r{i}", prompt(40 + i), 30)) for i in range(20)]
    assert {reply.status for reply in replies} == {"accepted"}
    for i in range(20):
        assert len(await frontend.done(f"r{i}")) == 30
    assert frontend.tokens("r0")[:20] == alone
    assert frontend.chunks["r0"][0].cached == [32]


async def _answer(frontend: ScriptedFrontend, item: Work) -> list[int]:
    assert (await frontend.dispatch("w-1", item)).status == "accepted"
    return await frontend.done(item.request)


async def test_a_migrated_request_continues_its_answer(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    await workers.start(FAST)
    whole = await _answer(frontend, work("whole", prompt(40)))
    longer = prompt(40) + array("I", whole[:8]).tobytes()
    rest = await _answer(frontend, work("rest", longer, generated=8))
    assert frontend.chunks["rest"][0].offset == 8
    assert rest == whole[8:]


async def test_the_stream_matches_the_cache_under_eviction(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    started = await workers.start(FAST)
    for i in range(60):
        item = work(f"r{i}", prompt(200, first=i % 23), 10)
        assert (await frontend.dispatch("w-1", item)).status == "accepted"
    for i in range(60):
        await frontend.done(f"r{i}")
    (load,) = started.node.load()
    assert load.cached_blocks > 200
    held = frontend.contents.held
    await eventually(lambda: len(held.get(("w-1", 0), ())) == load.cached_blocks)
    last = {*array("Q", block_hashes(prompt(200, first=59 % 23), 16, SALT)[1])}
    assert last <= held["w-1", 0]
    before = set(held["w-1", 0])
    assert (await frontend.dump("w-1", 0)).ok
    await eventually(lambda: frontend.contents.dumps == 1)
    await eventually(lambda: held["w-1", 0] == before)
    assert not (await frontend.dump("w-1", 1)).ok
    assert (await frontend.control("w-1", Clear())).ok
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
    frontend: ScriptedFrontend, workers: Workers, item: Work, reason: str
) -> None:
    await workers.start(FAST)
    reply = await frontend.dispatch("w-1", item)
    assert reply.status == "invalid"
    assert reason in reply.reason
    assert len(await _answer(frontend, work("good", prompt(8)))) == 20


async def test_malformed_work_and_commands_are_answered(
    bus: Bus, frontend: ScriptedFrontend, workers: Workers
) -> None:
    await workers.start(FAST)
    reply = await bus.request(
        bus.subjects.work("w-1"), {"request": 3}, MessageDecoder(WorkReply), PATIENCE_S
    )
    assert reply.status == "invalid"
    assert not (await frontend.control("w-1", {"type": "nonsense"})).ok
    assert not (await frontend.control("w-1", {"type": "ping"})).ok
    await ping(bus, "w-1", PATIENCE_S)


async def test_too_many_waiting_is_busy(frontend: ScriptedFrontend, workers: Workers) -> None:
    mock = MockSettings(blocks=256, max_sequences=1)
    await workers.start(mock, WorkerSettings(max_waiting=2))
    replies = [await frontend.dispatch("w-1", work(f"r{i}", prompt(40), 400)) for i in range(6)]
    statuses = [reply.status for reply in replies]
    assert statuses[:2] == ["accepted", "accepted"]
    assert statuses[-1] == "busy"


async def test_cancel_stops_the_engine_and_frees_its_blocks(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    started = await workers.start(SLOW)
    await frontend.dispatch("w-1", work("a", prompt(40), 3000))
    await eventually(lambda: len(frontend.chunks.get("a", [])) > 2)
    assert (await frontend.control("w-1", Cancel("a"))).ok
    assert await eventually(lambda: frontend.finish("a")) == "abort"
    (load,) = started.node.load()
    assert (load.running, load.active_blocks, load.aborted) == (0, 0, 1)
    assert not (await frontend.control("w-1", Cancel("a"))).ok


async def test_load_reports_running_and_waiting_requests(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    await workers.start(SLOW)
    await frontend.dispatch("w-1", work("a", prompt(40), 200))
    await eventually(lambda: any(load.running == 1 for load in frontend.loads))
    await frontend.control("w-1", Cancel("a"))
    (last,) = await eventually(lambda: [load for load in frontend.loads[-1:] if load.aborted])
    assert (last.instance, last.rank, last.requests, last.prompt_tokens) == ("w-1", 0, 1, 40)
    assert last.total_blocks == 256
    assert last.output_tokens > 0


async def test_a_drained_worker_finishes_its_work_and_takes_no_more(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    started = await workers.start(SLOW)
    await frontend.dispatch("w-1", work("a", prompt(40), 60))
    await eventually(lambda: frontend.chunks.get("a"))
    drained = asyncio.create_task(started.node.drain(30))
    await eventually(lambda: started.node.draining)
    assert (await frontend.dispatch("w-1", work("b", prompt(8)))).status == "draining"
    await drained
    assert len(await frontend.done("a")) == 60
    await started.node.close()

    async def gone() -> bool:  # the server may not have read the last words yet
        with suppress(RequestTimeout):
            await frontend.dispatch("w-1", work("c", prompt(8)), timeout=2)
        return False

    with pytest.raises(NoResponder):
        await eventually(gone)


async def test_requests_that_outlast_the_drain_are_handed_back(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    started = await workers.start(SLOW)
    await frontend.dispatch("w-1", work("a", prompt(40), 3000))
    await eventually(lambda: frontend.chunks.get("a"))
    await started.node.drain(0.05)
    assert await eventually(lambda: frontend.finish("a")) == "abort"


async def test_the_drain_command_ends_the_node(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    started = await workers.start(FAST)
    assert (await frontend.control("w-1", Drain())).ok
    assert started.ends == [None]


async def test_a_model_folder_without_files_is_a_clear_error(
    workers: Workers, tmp_path: Path
) -> None:
    settings = Settings()
    engine = create_engine(EngineContext(settings, tmp_path))
    with pytest.raises(EngineError, match=str(tmp_path)):
        await engine.start(None)  # type: ignore[arg-type]


async def test_no_event_is_lost_while_the_server_is_away(
    frontend: ScriptedFrontend, workers: Workers, nats_server: NatsServer
) -> None:
    started = await workers.start(FAST)
    await _answer(frontend, work("before", prompt(100)))
    await frontend.dispatch("w-1", work("during", prompt(100, first=3), 2000))
    await eventually(lambda: frontend.chunks.get("during"))
    nats_server.restart()
    await eventually(lambda: started.bus.connected and frontend.bus.connected)
    await eventually(lambda: not started.node.load()[0].running)
    (load,) = started.node.load()
    held = frontend.contents.held["w-1", 0]
    await eventually(lambda: len(held) == load.cached_blocks)
    await ensure_streams(frontend.bus, StreamLimits(lease_s=1.0))


async def test_stored_blocks_carry_the_prompts_own_hashes(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    await workers.start(FAST)
    seen: list[Stored] = []
    reader = StreamReader(
        frontend.bus,
        frontend.bus.subjects.kv_stream,
        frontend.bus.subjects.kv_all,
        lambda m: seen.extend(
            e for e in msgspec.msgpack.decode(m.data, type=KvBatch).events if isinstance(e, Stored)
        ),
        Start(),
    )
    await reader.open()
    await _answer(frontend, work("a", prompt(40), 1))
    (event,) = await eventually(lambda: seen)
    local, sequence = block_hashes(prompt(40), 16, SALT)
    assert (event.tier, event.parent, event.salt) == (0, None, SALT)
    assert (event.local, event.engine) == (local, sequence)
    await reader.close()
