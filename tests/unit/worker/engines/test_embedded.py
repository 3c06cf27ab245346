"""The SGLang and TensorRT-LLM engines against stand-ins with the published API."""

import asyncio
import json
import sys
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import pytest_asyncio
from msgspec.structs import replace
from support import sglang_standin, trtllm_standin
from support.api_server import continuation, unpack
from support.recorder import Recorder
from support.wait import eventually

from kvmesh.bus.messages import (
    Clear,
    Guided,
    NotCleared,
    Pin,
    Release,
    Retain,
    Sampling,
    Unpin,
    Work,
)
from kvmesh.demo import model_dir
from kvmesh.hashing import block_hashes, salt
from kvmesh.settings import Settings
from kvmesh.settings.schema import SglangSettings, TrtllmSettings, WorkerSettings
from kvmesh.worker.abilities import HANDOFF, abilities, undeclared
from kvmesh.worker.capabilities import FollowingEvents, execute_command
from kvmesh.worker.engine import Engine, EngineContext, EngineError, EngineInfo, Rejected

PLAIN = salt("kvmesh-demo")
TAG = "0123456789abcdef" * 2
SIZE = 16
SGLANG = pytest.mark.parametrize("make", ["sglang"], indirect=True)
TRTLLM = pytest.mark.parametrize("make", ["trtllm"], indirect=True)


def prompt(length: int, first: int = 0) -> bytes:
    return array("I", [(first + 13 * i) % 4000 for i in range(length)]).tobytes()


def work(name: str, tokens: bytes, max_tokens: int = 12, **fields: object) -> Work:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    base = Work(request=name, frontend="f", tokens=tokens, sampling=sampling, salt=PLAIN)
    return replace(base, **fields)


def sequence(tokens: bytes, seed: int = PLAIN) -> set[int]:
    return set(array("Q", block_hashes(tokens, SIZE, seed)[1]))


class Run:
    """A started engine, its recorder, and the stand-in behind it."""

    def __init__(self, kind: str, engine: Engine) -> None:
        self.kind = kind
        self.engine = engine
        self.sink = Recorder()
        self.info: EngineInfo | None = None
        self.standin: Any = None

    async def start(self) -> None:
        self.info = await self.engine.start(self.sink)
        sglang, trtllm = sglang_standin.Engine.made, trtllm_standin.LLM.made
        self.standin = sglang[-1] if self.kind == "sglang" else trtllm[-1]

    async def run(self, *items: Work) -> None:
        for item in items:
            self.engine.submit(item)
        await self.ended(*(item.request for item in items))

    async def ended(self, *names: str) -> None:
        await eventually(lambda: all(map(self.sink.finish, names)), what=f"end of {names}")


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the stand-ins under the names of the real packages."""
    for standin in (sglang_standin, trtllm_standin):
        for name, module in standin.modules(standin).items():
            monkeypatch.setitem(sys.modules, name, module)


Make = Callable[..., Run]
Start = Callable[..., Awaitable[Run]]
Serves: TypeAlias = Literal["aggregated", "prefill", "decode"]


@pytest.fixture(params=["sglang", "trtllm"])
def make(request: pytest.FixtureRequest, standins: None) -> Make:
    from kvmesh.worker.engine import create_engine

    kind: str = request.param

    def build(*args: str, folder: Path | None = None, serves: Serves = "aggregated") -> Run:
        engine: Any = kind
        worker = WorkerSettings(engine=engine, context=512, serves=serves)
        settings = Settings(
            worker=worker,
            sglang=SglangSettings(args=["load_format=dummy", *args]),
            trtllm=TrtllmSettings(args=list(args)),
        )
        return Run(kind, create_engine(EngineContext(settings, folder or model_dir())))

    return build


@pytest_asyncio.fixture
async def started(make: Make) -> AsyncIterator[Start]:
    """Starts engines with the given arguments and closes them in the end."""
    runs: list[Run] = []

    async def start(*args: str, serves: Serves = "aggregated") -> Run:
        made = make(*args, serves=serves)
        await made.start()
        runs.append(made)
        return made

    yield start
    for made in runs:
        await made.engine.close()
        closing = getattr(made.standin, "_closing", None)
        if closing is not None:
            await closing


@pytest_asyncio.fixture
async def run(started: Start) -> Run:
    return await started()


async def test_its_abilities_are_the_declared_ones(started: Start) -> None:
    plain = await started()
    assert plain.info is not None
    assert not undeclared(plain.engine, plain.info)
    prefill = await started(serves="prefill")
    assert prefill.info is not None
    assert HANDOFF in abilities(prefill.engine, prefill.info)
    assert not undeclared(prefill.engine, prefill.info)


async def test_tokens_stream_and_end(run: Run) -> None:
    assert run.info is not None
    assert (run.info.context, run.info.block_size) == (512, SIZE)
    await run.run(work("a", prompt(40)))
    assert run.sink.tokens("a") == continuation(unpack(prompt(40)), 12)
    assert run.sink.finish("a") == "length"


async def test_a_migrated_answer_is_continued(run: Run) -> None:
    tokens = continuation(unpack(prompt(40)), 12)
    longer = prompt(40) + array("I", tokens[:5]).tobytes()
    await run.run(work("a", longer, generated=5))
    assert run.sink.tokens("a") == tokens[5:]


async def test_an_abort_reaches_the_engine(run: Run) -> None:
    run.engine.submit(work("a", prompt(40), max_tokens=400))
    await eventually(lambda: run.sink.tokens("a"))
    assert run.engine.abort("a")
    await asyncio.wait_for(run.engine.drain(), 5)
    assert run.sink.finish("a") == "abort"
    await eventually(lambda: not run.standin.server.running)


async def test_events_equal_the_cache(run: Run) -> None:
    for i in range(30):
        await run.run(work(f"r{i}", prompt(60 + 3 * i, first=i % 7)))
    held = run.standin.server.held
    await eventually(lambda: run.sink.held.get(0) == set(held), what="events arrive")
    assert run.sink.removed > 0
    before = set(run.sink.held[0])
    run.sink.held[0].add(1)
    run.engine.dump(0)
    assert run.sink.held[0] == before


async def test_tenants_do_not_share(run: Run) -> None:
    await run.run(work("a", prompt(40), max_tokens=1))
    await run.run(work("b", prompt(40), max_tokens=1, salt=77, tenant=TAG))
    both = sequence(prompt(40)) | sequence(prompt(40), 77)
    await eventually(lambda: run.sink.sequences == both)
    await run.run(work("c", prompt(40), max_tokens=1, salt=77, tenant=TAG))
    assert (run.sink.cached("b"), run.sink.cached("c")) == (0, 32)
    salts = [call.get("cache_salt") for call in run.standin.calls]
    assert salts == [None, f"{TAG}-kvm{77:016x}", f"{TAG}-kvm{77:016x}"]


async def test_tenants_whose_salts_collide_do_not_share(run: Run) -> None:
    await run.run(work("a", prompt(40), max_tokens=1, salt=77, tenant=TAG))
    await run.run(work("b", prompt(40), max_tokens=1, salt=77, tenant="f" * 32))
    await run.run(work("c", prompt(40), max_tokens=1, salt=PLAIN, tenant=TAG))
    await run.run(work("d", prompt(40), max_tokens=1))
    assert [run.sink.cached(name) for name in "abcd"] == [0, 0, 0, 0]


async def test_higher_priority_goes_first(run: Run) -> None:
    await run.run(work("first", prompt(20, first=50), max_tokens=1))
    run.standin.server.step_s = 0.01
    for i in range(4):
        run.engine.submit(work(f"busy{i}", prompt(20, first=i), max_tokens=30))
    await eventually(lambda: len(run.standin.server.running) == 4)
    for name, priority in (("low", 0), ("high", 5), ("lowest", -3)):
        run.engine.submit(work(name, prompt(20, first=len(name)), priority=priority))
    await run.ended("low", "high", "lowest")
    assert [n for n in run.sink.order if n in ("low", "high", "lowest")] == [
        "high",
        "low",
        "lowest",
    ]


async def test_log_probabilities_come_with_their_tokens(run: Run) -> None:
    await run.run(work("a", prompt(40), sampling=Sampling(max_tokens=5, logprobs=3)))
    given = [row for delta in run.sink.deltas["a"] for row in delta.logprobs or []]
    for token, row in zip(run.sink.tokens("a"), given, strict=True):
        assert len(row) == 3
        assert row[token] == max(row.values()) == -0.1


async def test_bad_parameters_are_rejected(run: Run) -> None:
    item = work("a", prompt(40), sampling=Sampling(max_tokens=5, temperature=-1))
    if run.kind == "sglang":
        await run.run(item)
        assert "temperature" in str(run.sink.deltas["a"][-1].error)
        assert run.sink.deltas["a"][-1].invalid
    else:
        with pytest.raises(Rejected, match="temperature"):
            run.engine.submit(item)
    with pytest.raises(Rejected, match="rank 3"):
        run.engine.submit(work("b", prompt(40), rank=3))


async def test_a_schema_reaches_the_engine(run: Run) -> None:
    schema = json.dumps({"type": "object"})
    guided = Guided(kind="json_schema", value=schema)
    await run.run(work("a", prompt(40), sampling=Sampling(max_tokens=3, guided=guided)))
    params = run.standin.calls[-1]["sampling_params"]
    given = params["json_schema"] if run.kind == "sglang" else params.guided_decoding.json
    assert given == schema


async def test_the_load_is_reported(run: Run) -> None:
    await run.run(work("first", prompt(20, first=50), max_tokens=1))
    run.standin.server.step_s = 0.01
    for i in range(6):
        run.engine.submit(work(f"r{i}", prompt(50, first=i), max_tokens=60))
    await eventually(lambda: run.engine.load("i")[0].running == 4)
    await asyncio.wait_for(run.engine.drain(), 20)
    load = run.engine.load("i")[0]
    assert (load.running, load.active_blocks, load.requests) == (0, 0, 7)
    await eventually(lambda: run.engine.load("i")[0].steps > 60)


async def test_wrong_settings_stop_the_start(make: Make, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"failed to start: .*no_such"):
        await make("no_such=1").start()
    with pytest.raises(EngineError, match=r"failed to start: .*config"):
        await make(folder=tmp_path).start()


async def test_a_prompt_is_handed_off(started: Start) -> None:
    prefill, decode = await started(serves="prefill"), await started(serves="decode")
    assert prefill.info is not None
    assert decode.info is not None
    assert prefill.info.supports_handoff
    assert decode.info.supports_handoff
    assert decode.info.needs_handoff == (decode.kind == "sglang")
    await prefill.run(work("a#prefill", prompt(40), prefill=True))
    last = prefill.sink.deltas["a#prefill"][-1]
    assert (last.finish, last.error) == ("length", None)
    assert last.handoff is not None
    await decode.run(work("a", prompt(40), handoff=last.handoff))
    assert decode.sink.tokens("a") == continuation(unpack(prompt(40)), 12)
    await asyncio.wait_for(prefill.engine.drain(), 5)
    assert [delta.finish for delta in prefill.sink.deltas["a#prefill"]][-1] == "length"


@SGLANG
async def test_a_prompt_counts_while_it_waits_for_its_decode_engine(started: Start) -> None:
    prefill = await started(serves="prefill")
    await prefill.run(work("a", prompt(40), prefill=True))
    [load] = prefill.engine.load("i")
    assert (load.waiting, load.prefill_tokens, load.requests) == (1, 40, 0)
    assert prefill.engine.abort("a")
    await asyncio.wait_for(prefill.engine.drain(), 5)
    assert [delta.finish for delta in prefill.sink.deltas["a"]] == ["length"]


@SGLANG
async def test_a_decode_engine_of_sglang_returns_prompts_without_handoff(started: Start) -> None:
    decode = await started(serves="decode")
    await decode.run(work("a", prompt(40)))
    assert decode.sink.finish("a") == "abort"
    assert "cannot compute a prompt" in str(decode.sink.deltas["a"][-1].error)


@TRTLLM
async def test_trtllm_gets_the_arguments_of_its_phase(started: Start) -> None:
    prefill, decode = await started(serves="prefill"), await started(serves="decode")
    assert prefill.standin.kwargs["disable_overlap_scheduler"]
    assert "disable_overlap_scheduler" not in decode.standin.kwargs
    await prefill.run(work("a", prompt(40), prefill=True))
    await decode.run(work("b", prompt(40), handoff=prefill.sink.deltas["a"][-1].handoff))
    params = decode.standin.calls[-1]["disaggregated_params"]
    assert (params.request_type, params.ctx_request_id) == ("generation_only", 7)
    assert (params.opaque_state, params.ctx_info_endpoint) == (b"\x00\xff", "tcp://127.0.0.1:9")


async def fill(run: Run, count: int) -> None:
    """Use the cache for `count` prompts of three blocks each."""
    for i in range(count):
        await run.run(work(f"fill{i}", prompt(48, first=100 + i), max_tokens=1))


@SGLANG
async def test_sglang_evicts_low_priorities_first(started: Start) -> None:
    run = await started()
    await run.run(work("high", prompt(48), max_tokens=1, priority=5))
    await fill(run, 30)
    await run.run(work("again", prompt(48), max_tokens=1))
    assert run.sink.cached("again") == 47
    assert sequence(prompt(48)) <= run.sink.sequences


@SGLANG
async def test_sglang_evicts_blocks_of_closed_sessions_first(started: Start) -> None:
    run = await started("enable_session_radix_cache=true")
    for name in ("open", "closed"):
        tokens = prompt(48, first=len(name))
        await run.run(work(name, tokens, max_tokens=1, session=name))
    await execute_command(run.engine, run.kind, Release(sessions=["closed", "unknown"]))
    await fill(run, 30)
    for name, cached in (("open", 47), ("closed", 0)):
        tokens = prompt(48, first=len(name))
        await run.run(work(f"{name} again", tokens, max_tokens=1))
        assert run.sink.cached(f"{name} again") == cached


@SGLANG
async def test_sglang_reports_the_tiers_of_hicache(started: Start) -> None:
    run = await started("enable_hierarchical_cache=true", "hicache_storage_backend=file")
    await run.run(work("a", prompt(40), max_tokens=1))
    await eventually(lambda: run.sink.below.get(1) == run.sink.held.get(0, set()) != set())
    run.standin.host_hits = SIZE
    await run.run(work("b", prompt(40), max_tokens=1))
    [cached] = [delta.cached for delta in run.sink.deltas["b"] if delta.cached]
    assert cached == [SIZE, SIZE, 0, 0]
    reply = await execute_command(run.engine, run.kind, Clear(tiers=[0]))
    assert [each.tier for each in reply.not_cleared] == [0], "it clears both memories or none"
    assert (await execute_command(run.engine, run.kind, Clear())).ok
    assert run.standin.storage_cleared


@SGLANG
async def test_sglang_tells_that_requests_use_its_blocks(run: Run) -> None:
    run.standin.server.step_s = 0.02
    run.engine.submit(work("a", prompt(40), max_tokens=400))
    await eventually(lambda: run.sink.tokens("a"))
    reply = await execute_command(run.engine, run.kind, Clear())
    assert reply.not_cleared == [NotCleared(0, "Timed out waiting for idle state.")]
    assert run.engine.abort("a")


@SGLANG
@pytest.mark.parametrize(
    ("arguments", "tiers"),
    [(["enable_lmcache=true"], [1, 2, 3]), (["hicache_storage_backend=eic"], [3])],
)
async def test_sglang_names_the_stores_whose_outcome_it_does_not_tell(
    started: Start, arguments: list[str], tiers: list[int]
) -> None:
    run = await started(*arguments)
    reply = await execute_command(run.engine, run.kind, Clear())
    assert [each.tier for each in reply.not_cleared] == tiers
    assert not reply.ok
    assert (await execute_command(run.engine, run.kind, Clear(tiers=[0]))).ok


@TRTLLM
async def test_trtllm_retains_blocks_of_higher_priority(run: Run) -> None:
    await run.run(work("a", prompt(40), priority=20), work("b", prompt(40)))
    important, usual = (call.get("kv_cache_retention_config") for call in run.standin.calls)
    assert usual is None
    [span] = important.token_range_retention_configs
    assert (span.token_start, span.token_end, span.priority) == (0, 40, 55)
    assert important.decode_retention_priority == 55


async def test_trtllm_receives_the_ranges_and_other_engines_report_them_unsupported(
    run: Run,
) -> None:
    ranges = [
        Retain(0, 32, 90, 60.0, explicit=True),
        Retain(16, 24, 10, explicit=True),
        Retain(32, 36, kind="thinking"),
    ]
    decode = Retain(0, None, 70, 5.0, "decode", True)
    await run.run(work("a", prompt(40), retention=ranges, decode=decode))
    assert run.info is not None
    assert run.info.retention == ("unsupported" if run.kind == "sglang" else "honoured")
    for command in (
        Release(sessions=["s"]),
        Pin(id="p", sequence_hashes=b"", ttl_s=1.0),
        Unpin("p"),
    ):
        reply = await execute_command(run.engine, run.kind, command)
        cause = f"the {run.kind} engine has no control over block retention"
        if isinstance(command, Release) and run.kind == "sglang":
            cause = "SGLang runs without enable_session_radix_cache"
        assert reply.reason == f"unsupported: {cause}"
    assert not (await execute_command(run.engine, run.kind, Clear(salt=1))).ok
    if run.kind == "sglang":
        return
    reason = "TensorRT-LLM's API cannot clear its cache"
    reply = await execute_command(run.engine, "trtllm", Clear())
    assert (reply.ok, reply.not_cleared) == (False, [NotCleared(0, reason)])
    assert (await execute_command(run.engine, "trtllm", Clear(tiers=[2, 3]))).ok
    given = run.standin.calls[-1]["kv_cache_retention_config"]
    spans = [
        (span.token_start, span.token_end, span.priority, span.duration_ms)
        for span in given.token_range_retention_configs
    ]
    minute = timedelta(seconds=60)
    assert spans == [
        (0, 16, 90, minute),
        (16, 24, 10, None),
        (24, 32, 90, minute),
        (32, 36, 0, None),
    ]
    assert (given.decode_retention_priority, given.decode_duration_ms) == (70, timedelta(seconds=5))


@TRTLLM
async def test_trtllm_updates_move_blocks_between_tiers(run: Run) -> None:
    await run.run(work("a", prompt(40), max_tokens=1))
    await eventually(lambda: len(run.sink.held.get(0, ())) == 2)
    [first, _] = run.standin.server.held
    level = {"type": "event_diff", "old_value": 0, "new_value": 1}
    run.standin.emit({"type": "updated", "block_hash": first, "cache_level": level})
    await eventually(lambda: run.sink.removed == 1)
    assert run.engine.load("i")[0].cached_blocks == 1


@TRTLLM
async def test_trtllm_a_wider_window_takes_over_and_the_limit_is_told(run: Run) -> None:
    await run.run(work("a", prompt(40), max_tokens=1))
    await eventually(lambda: len(run.sink.held.get(0, ())) == 2)
    assert isinstance(run.engine, FollowingEvents)
    assert run.engine.event_counts()[0].limits == []
    run.standin.emit({"type": "created", "num_blocks_per_cache_level": [64, 0]}, window=4096)
    await eventually(lambda: run.engine.load("i")[0].cached_blocks == 0)
    assert run.engine.event_counts()[0].limits == ["windows"]


@TRTLLM
async def test_trtllm_many_losses_cause_few_dumps(run: Run) -> None:
    await run.run(work("a", prompt(40), max_tokens=1))
    await eventually(lambda: len(run.sink.held.get(0, ())) == 2)
    dumps = run.sink.clears
    for _ in range(20):
        run.standin.next_id += 3
        run.standin.emit({"type": "created", "num_blocks_per_cache_level": [64, 0]})
    await eventually(lambda: not run.standin.queue)
    assert run.sink.clears == dumps + 1
