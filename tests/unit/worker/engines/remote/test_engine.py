"""The sidecar in front of a server that speaks vLLM's and SGLang's published APIs."""

import asyncio
import json
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from msgspec.structs import replace
from support.api_server import ApiServer, continuation, unpack
from support.engines import make_prefetch
from support.recorder import Recorder
from support.wait import eventually

from kvmesh.bus.messages import Clear, Guided, Sampling, Work
from kvmesh.demo import model_dir
from kvmesh.hashing import block_hashes, salt
from kvmesh.settings import Settings
from kvmesh.settings.schema import RemoteSettings, WorkerSettings
from kvmesh.worker.abilities import undeclared
from kvmesh.worker.capabilities import (
    AdapterLoading,
    Prefetching,
    Retaining,
    TierCounts,
    Tiered,
    execute_command,
)
from kvmesh.worker.engine import (
    EngineConfigError,
    EngineContext,
    EngineError,
    EngineInfo,
    Rejected,
    Unsupported,
    create_engine,
)
from kvmesh.worker.engines.remote.engine import RemoteEngine
from kvmesh.worker.lora.folder import AdapterError

PLAIN = salt("kvmesh-demo")
SIZE = 16


def prompt(length: int, first: int = 0) -> bytes:
    return array("I", [(first + 13 * i) % 4000 for i in range(length)]).tobytes()


def work(name: str, tokens: bytes, max_tokens: int = 12, **fields: object) -> Work:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    base = Work(request=name, frontend="f", tokens=tokens, sampling=sampling, salt=PLAIN)
    return replace(base, **fields)


def sequence(tokens: bytes, seed: int = PLAIN) -> set[int]:
    return set(array("Q", block_hashes(tokens, SIZE, seed)[1]))


class Sidecar:
    """An engine in front of a server."""

    def __init__(self, server: ApiServer, **options: object) -> None:
        self.server = server
        self.sink = Recorder()
        publisher = server.publisher
        remote = RemoteSettings(
            url=server.url,
            probe_s=0.02,
            kv_events=publisher.endpoint,
            kv_replay=publisher.replay,
        )
        remote = replace(remote, **options)
        settings = Settings(remote=remote, worker=WorkerSettings(engine="openai"))
        self.engine = create_engine(EngineContext(settings, model_dir()))
        self.info: EngineInfo | None = None

    async def start(self) -> None:
        self.info = await self.engine.start(self.sink)

    async def run(self, *items: Work) -> None:
        for item in items:
            self.engine.submit(item)
        await self.ended(*(item.request for item in items))

    async def ended(self, *names: str) -> None:
        await eventually(lambda: all(map(self.sink.finish, names)), what=f"end of {names}")


Start = Callable[..., Awaitable[Sidecar]]


@pytest_asyncio.fixture(params=["vllm", "sglang"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ApiServer]:
    made = ApiServer(tmp_path, request.param)
    await made.start()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def start(server: ApiServer) -> AsyncIterator[Start]:
    made: list[Sidecar] = []

    async def begin(**options: object) -> Sidecar:
        sidecar = Sidecar(server, **options)
        made.append(sidecar)
        await sidecar.start()
        return sidecar

    yield begin
    for sidecar in made:
        await sidecar.engine.close()


async def test_the_engine_info_comes_from_the_server(start: Start) -> None:
    sidecar = await start()
    info = sidecar.info
    assert info is not None
    assert (info.context, info.block_size, info.capacity.blocks) == (512, 16, 64)
    assert (info.adapters, info.version) == (["lora-a"], f"{sidecar.server.style} 9.9")
    assert not undeclared(sidecar.engine, info)


@pytest.mark.parametrize(("ranks", "warns"), [((2,), False), ((2, 3), True)])
async def test_a_server_of_a_deployment_publishes_behind_its_own_ranks(
    tmp_path: Path, ranks: tuple[int, ...], warns: bool
) -> None:
    server = ApiServer(tmp_path, "vllm", private=True, ranks=ranks)
    await server.start()
    of_rank_0 = {name: f"ipc://{tmp_path}/tcp-{name}:1" for name in ("events", "replay")}
    sidecar = Sidecar(server, kv_events=of_rank_0["events"], kv_replay=of_rank_0["replay"])
    await sidecar.start()
    await sidecar.run(work("a", prompt(64)))
    await eventually(lambda: sidecar.engine.load("w")[0].cached_blocks >= 4)
    assert sidecar.info is not None
    assert ("other_ranks" in sidecar.info.warnings) is warns
    await sidecar.engine.close()
    await server.close()


async def test_ranks_that_the_server_lacks_end_the_start(tmp_path: Path) -> None:
    server = ApiServer(tmp_path, "vllm")
    await server.start()
    with pytest.raises(EngineConfigError, match="1 of the 2 data-parallel ranks"):
        await Sidecar(server, dp_ranks=2).start()
    await server.close()


async def test_a_plugin_without_its_connector_is_a_warning(tmp_path: Path) -> None:
    server = ApiServer(tmp_path, "vllm", plugin_problem="no connector")
    await server.start()
    sidecar = Sidecar(server)
    await sidecar.start()
    assert sidecar.info is not None
    assert "no connector" in sidecar.info.warnings["no_retention"]
    assert isinstance(sidecar.engine, Retaining)
    with pytest.raises(Unsupported, match="plugin"):
        await sidecar.engine.release(["s"])
    await sidecar.run(work("a", prompt(40)))
    assert "kv_transfer_params" not in server.bodies[-1]
    await sidecar.engine.close()
    await server.close()


async def test_adapters_are_loaded_into_a_server_that_allows_it(
    tmp_path: Path,
) -> None:
    server = ApiServer(tmp_path, "vllm", adapters={})
    await server.start()
    sidecar = Sidecar(server)
    await sidecar.start()
    engine = sidecar.engine
    assert isinstance(engine, AdapterLoading)
    await engine.load_adapter("poet@1", tmp_path)
    assert server.adapters == {"poet@1": str(tmp_path)}
    with pytest.raises(AdapterError, match="replied 404: no such adapter"):
        await engine.load_adapter("ghost@1", tmp_path / "ghost")
    await sidecar.run(work("a", prompt(40), adapter="poet@1"))
    assert server.bodies[-1]["model"] == "poet@1"
    await engine.unload_adapter("poet@1")
    assert server.adapters == {}
    with pytest.raises(AdapterError, match="replied 404"):
        await engine.unload_adapter("poet@1")
    await engine.close()
    await server.close()


async def test_a_server_without_the_endpoint_loads_no_adapters(
    server: ApiServer, start: Start, tmp_path: Path
) -> None:
    engine = (await start()).engine
    assert isinstance(engine, AdapterLoading)
    reason = "SGLang" if server.style == "sglang" else "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    with pytest.raises(Unsupported, match=reason):
        await engine.load_adapter("poet@1", tmp_path)


@pytest_asyncio.fixture
async def telling(tmp_path: Path) -> AsyncIterator[Sidecar]:
    """The sidecar of a vLLM with `--enable-prompt-tokens-details`."""
    server = ApiServer(tmp_path, "vllm", prompt_details=True)
    await server.start()
    sidecar = Sidecar(server)
    await sidecar.start()
    yield sidecar
    await sidecar.engine.close()
    await server.close()


async def test_a_vllm_s_cached_tokens_correct_the_estimate(telling: Sidecar) -> None:
    sink = telling.sink
    await telling.run(work("a", prompt(40)))
    await eventually(lambda: sequence(prompt(40)) <= sink.sequences)
    telling.server.held.clear()  # evictions whose events have not come
    await telling.run(work("b", prompt(40)), work("one", prompt(40, first=9), max_tokens=1))
    told = [delta.cached for delta in sink.deltas["b"] if delta.cached is not None]
    assert told == [[32], [0]]
    assert sink.finish("b") == "length"
    assert sink.cached("one") == 0
    assert telling.engine.load("i")[0].cached_tokens == 0


async def test_an_answer_whose_usage_does_not_come_is_complete(telling: Sidecar) -> None:
    telling.server.cut_usage = True
    await telling.run(work("a", prompt(40)))
    assert telling.sink.tokens("a") == continuation(unpack(prompt(40)), 12)
    assert telling.sink.finish("a") == "length"


async def test_a_prefetch_computes_in_slices(telling: Sidecar) -> None:
    engine, server, sink = telling.engine, telling.server, telling.sink
    tokens = prompt(200)
    assert isinstance(engine, Prefetching)
    assert not engine.prefetch(make_prefetch(tokens, "p", salt=PLAIN, compute=192))
    await eventually(lambda: sequence(tokens) <= sink.sequences, what="the whole prompt")
    await eventually(lambda: not engine.abort("p"), what="its end")
    lengths = [len(body["prompt"]) for body in server.bodies]
    assert len(lengths) > 2
    assert lengths == sorted(lengths)
    assert lengths[-1] == 193
    assert {body["max_tokens"] for body in server.bodies} == {1}
    assert not sink.deltas
    load = engine.load("i")[0]
    assert (load.requests, load.prompt_tokens) == (0, 0)


async def test_slices_wait_for_requests_that_reach_the_server_directly(telling: Sidecar) -> None:
    engine, server = telling.engine, telling.server
    server.step_s = 0.02

    async def polled(times: int) -> None:
        seen = server.polls
        await eventually(lambda: server.polls >= seen + times, what="polls of the metrics")

    direct = [server.enter({}, unpack(prompt(20, first=i)), 200, []) for i in range(5)]
    await eventually(lambda: len(server.running) == 4)
    await polled(2)
    assert isinstance(engine, Prefetching)
    assert not engine.prefetch(make_prefetch(prompt(64), "p", salt=PLAIN, compute=64))
    await polled(5)
    assert not server.bodies, "one of the others waits"
    for request in direct:
        server.release(request)
    await eventually(lambda: sequence(prompt(64)) <= telling.sink.sequences, what="the prefetch")


async def test_prefetches_need_a_server_that_reports_cached_tokens(
    start: Start, server: ApiServer
) -> None:
    command = make_prefetch(prompt(64), "p", salt=PLAIN)
    reply = await execute_command((await start()).engine, "openai", command)
    reason = "SGLang" if server.style == "sglang" else "--enable-prompt-tokens-details"
    assert not reply.ok
    assert reply.reason.startswith("unsupported: ")
    assert reason in reply.reason


KVBM_SERIES = """# TYPE kvmesh_vllm_loaded_blocks counter
kvmesh_vllm_loaded_blocks_total{engine="0",tier="1"} 5.0
kvmesh_vllm_loaded_blocks_total{engine="1",tier="1"} 2.0
kvmesh_vllm_loaded_blocks_total{engine="0",tier="9"} 2.0
# TYPE kvmesh_vllm_written_blocks counter
kvmesh_vllm_written_blocks_total{engine="0"} 3.0
"""


@pytest.mark.parametrize("series", [KVBM_SERIES, ""])
async def test_a_server_with_the_block_manager_has_lower_tiers(tmp_path: Path, series: str) -> None:
    server = ApiServer(tmp_path, "vllm", kvbm_series=series)
    await server.start()
    sidecar = Sidecar(server, kvbm=True)
    await sidecar.start()
    engine = sidecar.engine
    assert isinstance(engine, Tiered)
    assert sidecar.info is not None
    assert sidecar.info.tiered == bool(series)
    await sidecar.run(work("a", prompt(40)))
    assert ("kv_transfer_params" in server.bodies[-1]) == bool(series)
    if series:
        expected = TierCounts(loaded=[0, 7, 0, 0], written=3)
        await eventually(lambda: engine.tier_counts() == expected, what="the server's metrics")
    else:
        assert engine.tier_counts() is None
    await engine.close()
    await server.close()


async def test_tokens_stream_as_token_ids(start: Start) -> None:
    sidecar = await start()
    await sidecar.run(work("a", prompt(40)))
    assert sidecar.sink.tokens("a") == continuation(unpack(prompt(40)), 12)
    assert sidecar.sink.finish("a") == "length"
    assert len(sidecar.sink.deltas["a"]) > 2


async def test_a_stop_token_ends_the_output(start: Start) -> None:
    sidecar = await start()
    tokens = continuation(unpack(prompt(40)), 12)
    sampling = Sampling(max_tokens=12, stop_token_ids=[tokens[4]])
    await sidecar.run(work("a", prompt(40), sampling=sampling))
    assert sidecar.sink.finish("a") == "stop"
    assert sidecar.sink.tokens("a") == tokens[: tokens.index(tokens[4]) + 1]


async def test_a_migrated_answer_is_continued(start: Start) -> None:
    sidecar = await start()
    tokens = continuation(unpack(prompt(40)), 12)
    longer = prompt(40) + array("I", tokens[:5]).tobytes()
    await sidecar.run(work("a", longer, generated=5))
    assert sidecar.sink.tokens("a") == tokens[5:]


async def test_an_abort_reaches_the_server(start: Start) -> None:
    sidecar = await start()
    sidecar.engine.submit(work("a", prompt(40), max_tokens=400))
    await eventually(lambda: sidecar.sink.tokens("a"))
    assert sidecar.engine.abort("a")
    assert not sidecar.engine.abort("a")
    await asyncio.wait_for(sidecar.engine.drain(), 5)
    assert sidecar.sink.finish("a") == "abort"
    await eventually(lambda: not sidecar.server.running, what="the server stops")
    assert len(sidecar.sink.tokens("a")) < 400


async def test_events_equal_the_cache_of_the_server(start: Start) -> None:
    sidecar = await start()
    for i in range(30):
        await sidecar.run(work(f"r{i}", prompt(60 + 3 * i, first=i % 7)))
    sink, held = sidecar.sink, sidecar.server.held
    await eventually(lambda: sink.held[0] == set(held), what="events arrive")
    assert sink.removed > 0
    before = set(sink.held[0])
    sink.held[0].add(1)
    sidecar.engine.dump(0)
    assert sink.held[0] == before
    assert sidecar.engine.load("i")[0].cached_blocks == len(before)


async def test_a_cached_prefix_is_counted(start: Start) -> None:
    sidecar = await start()
    await sidecar.run(work("a", prompt(40), max_tokens=1))
    await eventually(lambda: len(sidecar.sink.held.get(0, ())) == 2)
    await sidecar.run(work("b", prompt(100), max_tokens=1))
    assert (sidecar.sink.cached("a"), sidecar.sink.cached("b")) == (0, 32)


async def test_tenants_do_not_share(start: Start) -> None:
    sidecar = await start()
    await sidecar.run(work("a", prompt(40), max_tokens=1))
    await sidecar.run(work("b", prompt(40), max_tokens=1, salt=77, tenant="team"))
    await eventually(lambda: len(sidecar.sink.sequences) == 4)
    assert sidecar.sink.sequences == sequence(prompt(40)) | sequence(prompt(40), 77)
    assert sidecar.sink.cached("b") == 0


async def test_clear_resets_the_cache_of_the_server(start: Start) -> None:
    sidecar = await start()
    await sidecar.run(work("a", prompt(100), max_tokens=1))
    await eventually(lambda: sidecar.sink.held.get(0))
    await sidecar.engine.clear(Clear())
    await eventually(lambda: not sidecar.sink.held[0])


async def test_priority_is_sent_in_the_polarity_of_the_server(start: Start) -> None:
    polarity = "lower"
    sidecar = await start(priority=polarity)
    sidecar.server.step_s = 0.02
    if sidecar.server.style == "sglang":
        await sidecar.engine.close()
        sidecar = await start(priority="higher")
    busy = [work(f"busy{i}", prompt(20, first=i), max_tokens=30) for i in range(4)]
    for item in busy:
        sidecar.engine.submit(item)
    await eventually(lambda: len(sidecar.server.running) == 4)
    for name, priority in (("low", 0), ("high", 5), ("lowest", -3)):
        sidecar.engine.submit(work(name, prompt(20, first=len(name)), priority=priority))
    await sidecar.ended("low", "high", "lowest")
    order = [name for name in sidecar.sink.order if not name.startswith("busy")]
    assert order == ["high", "low", "lowest"]


async def test_log_probabilities_come_by_token_id(start: Start) -> None:
    sidecar = await start()
    await sidecar.run(work("a", prompt(40), sampling=Sampling(max_tokens=5, logprobs=3)))
    given = [row for delta in sidecar.sink.deltas["a"] for row in delta.logprobs or []]
    for token, row in zip(sidecar.sink.tokens("a"), given, strict=True):
        assert len(row) == 3
        assert row[token] == max(row.values()) == -0.1


async def test_the_load_comes_from_the_server(start: Start) -> None:
    sidecar = await start()
    sidecar.server.step_s = 0.01
    for i in range(6):
        sidecar.engine.submit(work(f"r{i}", prompt(50, first=i), max_tokens=60))

    def loaded() -> bool:
        load = sidecar.engine.load("i")[0]
        return (load.running, load.waiting) == (4, 2) and load.active_blocks > 0

    await eventually(loaded)
    before = sidecar.engine.load("i")[0].steps
    await eventually(lambda: sidecar.engine.load("i")[0].steps > before)
    await asyncio.wait_for(sidecar.engine.drain(), 20)
    load = sidecar.engine.load("i")[0]
    assert (load.running, load.active_blocks, load.requests) == (0, 0, 6)
    assert (load.prompt_tokens, load.output_tokens) == (300, 360)


async def idle_polls(sidecar: Sidecar) -> None:
    polls = sidecar.server.polls
    await eventually(lambda: sidecar.server.polls > polls + 3, what="idle polls")


async def test_the_time_of_steps_is_that_of_own_requests(start: Start) -> None:
    """vLLM counts its steps; SGLang does not, so that there is no time of steps."""
    sidecar = await start()
    if sidecar.server.style == "sglang":
        await sidecar.run(work("a", prompt(40), max_tokens=20))
        assert sidecar.engine.load("i")[0].busy_s == 0.0
        return
    sidecar.server.step_s = 0.01
    began = time.monotonic()
    await sidecar.run(work("a", prompt(40), max_tokens=60))
    took = time.monotonic() - began
    await idle_polls(sidecar)
    load = sidecar.engine.load("i")[0]
    assert load.steps > 50
    assert 0.5 < load.busy_s < took
    await idle_polls(sidecar)
    assert sidecar.engine.load("i")[0].busy_s == load.busy_s


async def test_steps_of_other_clients_have_no_time(start: Start) -> None:
    sidecar = await start()
    if sidecar.server.style == "sglang":
        return
    sidecar.server.step_s = 0.01
    body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 100, "stream": True}
    body |= {"stop_token_ids": [], "ignore_eos": True, "return_token_ids": True}
    url = f"{sidecar.server.url}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
        before = sidecar.engine.load("i")[0].steps
        await eventually(lambda: sidecar.engine.load("i")[0].steps > before + 20)
        assert sidecar.engine.load("i")[0].busy_s == 0.0
        await answer.read()


async def test_a_dead_server_fails_the_engine(start: Start) -> None:
    sidecar = await start()
    sidecar.server.step_s = 0.05
    sidecar.engine.submit(work("a", prompt(40), max_tokens=400))
    await eventually(lambda: sidecar.sink.tokens("a"))
    await sidecar.server.close()
    await eventually(lambda: sidecar.sink.errors)
    assert "/health does not reply" in str(sidecar.sink.errors[0])


@pytest.mark.parametrize(("status", "finish"), [(503, "abort"), (429, "abort"), (400, "error")])
async def test_errors_of_the_caller_differ_from_those_of_the_server(
    start: Start, server: ApiServer, status: int, finish: str
) -> None:
    if server.style == "sglang":
        pytest.skip("statuses are those of the HTTP layer, which both share")
    sidecar = await start()
    server.status = status
    await sidecar.run(work("a", prompt(40)))
    [delta] = sidecar.sink.deltas["a"]
    assert (delta.finish, delta.invalid) == (finish, status == 400)
    assert f"no: {status}" in (delta.error or "")


async def test_a_server_without_token_ids_is_refused(start: Start, server: ApiServer) -> None:
    if server.style == "sglang":
        pytest.skip("/generate always tells ids")
    server.token_ids = False
    with pytest.raises(EngineError, match="token ids"):
        await start()


async def test_wrong_settings_fail_the_start(start: Start) -> None:
    with pytest.raises(EngineError, match="serves no model 'other'; it has: served"):
        await start(model="other")
    with pytest.raises(EngineError, match=r"cannot use http://127\.0\.0\.1:1/v1/models"):
        await start(url="http://127.0.0.1:1")
    with pytest.raises(EngineError, match="--remote-url is missing"):
        await start(url="")


async def test_the_key_and_the_request_follow_the_api_of_the_server(start: Start) -> None:
    sidecar = await start(api_key="secret")
    schema = json.dumps({"type": "object"})
    sampling = Sampling(
        max_tokens=3,
        top_k=5,
        seed=9,
        logit_bias={7: 1.5},
        guided=Guided(kind="json_schema", value=schema),
    )
    await sidecar.run(work("a", prompt(40), sampling=sampling, adapter="lora-a", session="s"))
    server = sidecar.server
    assert server.headers[-1]["Authorization"] == "Bearer secret"
    body = server.bodies[-1]
    if server.style == "vllm":
        assert (body["model"], body["top_k"], body["seed"]) == ("lora-a", 5, 9)
        assert body["structured_outputs"] == {"json": schema}
        assert body["session_id"] == "s"
    else:
        params = body["sampling_params"]
        assert (body["lora_path"], params["top_k"], params["sampling_seed"]) == ("lora-a", 5, 9)
        assert params["json_schema"] == schema
        body = params
    assert body["logit_bias"] == {"7": 1.5}


async def test_a_migrated_answer_continues_without_structural_tags(start: Start) -> None:
    sidecar = await start()
    tags = {"type": "triggered_tags", "triggers": ["<a"], "tags": [{"begin": "<a>"}]}
    guided = Guided(kind="structural_tag", value=json.dumps({"format": tags}))
    sampling = Sampling(max_tokens=9, guided=guided)
    await sidecar.run(work("a", prompt(40), sampling=sampling, generated=3))
    body = sidecar.server.bodies[-1]
    assert "structured_outputs" not in body
    assert "structural_tag" not in body.get("sampling_params", {})


async def test_bad_requests_are_rejected(start: Start) -> None:
    sidecar = await start()
    with pytest.raises(Rejected, match="rank 9"):
        sidecar.engine.submit(work("a", prompt(10), rank=9))
    tag = json.dumps({"format": {"type": "json_schema", "json_schema": {}}})
    for bound in (
        Guided(kind="json_object", value=""),
        Guided(kind="structural_tag", value=tag),
    ):
        guided = Sampling(max_tokens=9, guided=bound)
        with pytest.raises(Rejected, match="after a migration"):
            sidecar.engine.submit(work("a", prompt(10), sampling=guided, generated=3))
    fresh = RemoteEngine(WorkerSettings(), RemoteSettings(url="http://x"), "m", Path())
    with pytest.raises(Rejected, match="not started"):
        fresh.submit(work("a", prompt(10)))
