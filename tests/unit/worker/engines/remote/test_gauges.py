"""The load of servers whose series have labels."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from kvmesh.worker.capabilities import TierCounts
from kvmesh.worker.engines.remote.gauges import (
    Gauges,
    Sample,
    gauges_of,
    lower_tiers,
    rank_gauges,
    vllm_ranks,
)
from kvmesh.worker.engines.remote.server import InferenceServer


@pytest_asyncio.fixture
async def http() -> AsyncIterator[ClientSession]:
    async with ClientSession() as session:
        yield session


def series(name: str, value: float, **labels: str) -> Sample:
    return (name, labels, value)


def test_series_by_priority_are_parts_of_the_total() -> None:
    running, waiting = "sglang:num_running_reqs", "sglang:num_queue_reqs"
    samples = [
        *(series(running, value, priority=p) for p, value in (("", 37), ("0", 36), ("5", 1))),
        *(series(waiting, value, priority=p) for p, value in (("", 80), ("0", 80), ("5", 0))),
        series("sglang:token_usage", 0.5),
    ]
    assert gauges_of(samples, "m") == Gauges(37, 80, 0.5)
    assert gauges_of(samples[::-1], "m") == Gauges(37, 80, 0.5)
    assert gauges_of([s for s in samples if s[1].get("priority") != ""], "m").running == 37


def test_totals_of_one_label_are_split_by_another() -> None:
    name = "sglang:num_running_reqs"
    kinds = [("prefill", "", 5), ("prefill", "0", 4), ("prefill", "1", 1)]
    kinds += [("decode", "", 3), ("decode", "0", 3), ("decode", "1", 0)]
    samples = [series(name, n, engine_type=kind, priority=p) for kind, p, n in kinds]
    assert gauges_of(samples, "m").running == 8
    totals = [series(name, n, priority=p) for p, n in (("", 8), ("0", 7), ("1", 1))]
    assert gauges_of([*samples, *totals], "m").running == 8


@pytest.mark.parametrize("label", ["dp_rank", "engine"])
def test_data_parallel_ranks_add_up(label: str) -> None:
    name = {"dp_rank": "sglang:num_running_reqs", "engine": "vllm:num_requests_running"}[label]
    usage = {"dp_rank": "sglang:token_usage", "engine": "vllm:kv_cache_usage_perc"}[label]
    samples = [series(name, n, **{label: str(n)}, tp_rank=str(tp)) for n in (1, 2) for tp in (0, 1)]
    samples += [series(usage, n / 4, **{label: str(n)}) for n in (1, 2)]
    assert gauges_of(samples, "m") == Gauges(3, None, 0.375)
    assert gauges_of([*samples, series(name, 3)], "m").running == 3  # the total beside them


@pytest.mark.parametrize(("named", "model"), [("m", "m"), ("m", "an-alias"), ("", "m")])
def test_a_server_names_its_ranks(named: str, model: str) -> None:
    name, labels = "vllm:num_requests_running", {"model_name": named} if named else {}
    samples = [series(name, 0, engine=str(n), **labels) for n in (10, 9)]
    assert vllm_ranks([*samples, series("vllm:num_requests_waiting", 0, engine="1")], model) == [
        9,
        10,
    ]
    assert vllm_ranks([series(name, 0), series(name, 0, engine="all")], model) == []


@pytest.mark.parametrize("label", ["dp_rank", "engine"])
def test_each_rank_has_gauges_of_its_own(label: str) -> None:
    name = {"dp_rank": "sglang:num_queue_reqs", "engine": "vllm:num_requests_waiting"}[label]
    running = {"dp_rank": "sglang:num_running_reqs", "engine": "vllm:num_requests_running"}[label]
    samples = [series(name, 10 * n, **{label: str(n)}, model_name="m") for n in (2, 3)]
    samples += [series(running, n, **{label: str(n)}, model_name="m") for n in (2, 3)]
    found = rank_gauges([*samples, series(name, 50)], "m", [2, 3, 4])
    assert found == [Gauges(2, 20), Gauges(3, 30), Gauges()]


def test_only_the_own_model_counts() -> None:
    name = "vllm:num_requests_waiting"
    samples = [series(name, n, model_name=m, engine="0") for n, m in ((5, "m"), (7, "other"))]
    assert gauges_of(samples, "m").waiting == 5
    assert gauges_of(samples, "served-under-an-alias").waiting == 7


def test_a_server_without_metrics_has_no_gauges() -> None:
    assert gauges_of([], "m") == Gauges()


def test_cached_tokens_count_by_the_tier_of_their_source() -> None:
    name = "vllm:prompt_tokens_cached_by_source_total"
    counts = {"device": 640, "host": 320, "disk": 64, "p2p": 32, "external_unspecified": 32}
    samples = [
        series(name, value, source=source, model_name="m", engine=engine)
        for source, value in counts.items()
        for engine in "01"
    ]
    samples.append(series(name, 7, source="host", model_name="other"))
    assert gauges_of(samples, "m").served == [1280, 640, 128, 128]
    future = [series(name, 5, source="a tier of tomorrow")]
    assert gauges_of(future, "m").served == [0, 0, 0, 5]


@pytest.mark.parametrize(
    ("kvbm", "served", "loaded"),
    [
        (None, None, None),
        (None, [640, 0, 0, 0], None),
        (None, [640, 320, 64, 32], [0, 10, 2, 1]),
        ([0, 7, 0, 0], None, [0, 7, 0, 0]),
        ([0, 7, 1, 0], [640, 320, 64, 256], [0, 17, 3, 0]),
    ],
)
def test_lower_tiers_are_those_of_the_server_and_of_the_block_manager(
    kvbm: list[int] | None, served: list[int] | None, loaded: list[int] | None
) -> None:
    counts = None if kvbm is None else TierCounts(loaded=kvbm, written=3)
    found = lower_tiers(counts, served, 32)
    assert (None if found is None else found.loaded) == loaded
    assert found is None or found.written == (3 if kvbm else 0)


def test_parts_of_a_rank_add_up_and_repeats_do_not() -> None:
    """Series split by a label of later versions, repeated by processes of other kinds."""
    waiting, usage = "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
    parts = [
        series(waiting, value, reason=reason, engine=engine, pid=pid, pp_rank=pid, model_name="m")
        for reason, value in (("capacity", 5), ("deferred", 3))
        for engine in "01"
        for pid in "78"
    ]
    shares = [series(usage, value, group=g) for g, value in (("full", 0.5), ("window", 0.2))]
    assert gauges_of([*parts, *shares], "m") == Gauges(None, 16, 0.5)
    assert rank_gauges(parts, "m", [0, 1]) == [Gauges(None, 8)] * 2
    total = [series(waiting, 9, engine=engine, model_name="m") for engine in "01"]
    assert gauges_of([*parts, *total], "m").waiting == 18


async def test_a_value_that_is_no_number_is_no_load(http: ClientSession) -> None:
    running, waiting = "vllm:num_requests_running NaN", "vllm:num_requests_waiting 3"
    text = f"{running}\n{waiting}\nvllm:kv_cache_usage_perc +Inf\n"

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server:
        gauges, _ = await InferenceServer(http, str(server.make_url(""))).gauges("m")
    assert (gauges.running, gauges.waiting, gauges.usage) == (None, 3, None)
