"""The sidecar in front of a server that embeds texts or scores documents."""

from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from msgspec.structs import replace
from support.recorder import Recorder
from support.wait import eventually

from kvmesh.bus.messages import EMBED, SCORE, Pooling, Sampling, Work
from kvmesh.demo import model_dir
from kvmesh.settings import Settings
from kvmesh.settings.schema import RemoteSettings, WorkerSettings
from kvmesh.worker.engine import EngineContext, EngineError, create_engine

WORK = Work(
    request="r",
    frontend="f",
    tokens=array("I", [1, 2, 3]).tobytes(),
    sampling=Sampling(max_tokens=1),
    pooling=Pooling(task=EMBED, lengths=[2, 1]),
)
PAIRS = Pooling(task=SCORE, lengths=[2, 1], seconds=[1, 0], pairs=[("q", "d"), ("p", "e")])


class Server:
    """A server with one of both paths, whose answer tests replace."""

    def __init__(self, task: str) -> None:
        self.path = "/v1/embeddings" if task == EMBED else "/v1/rerank"
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.answer: Callable[[dict[str, Any]], Any] = self._usual
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post(self.path, self._reply)
        self._runner = web.AppRunner(app)

    async def start(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 64}]})

    async def _reply(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.bodies.append(body)
        return web.json_response(self.answer(body), status=self.status)

    def _usual(self, body: dict[str, Any]) -> dict[str, Any]:
        if "input" in body:
            rows = [{"index": i, "embedding": [len(t), 0.5]} for i, t in enumerate(body["input"])]
            return {"data": rows[::-1]}
        found = [{"index": i, "relevance_score": 0.25} for i in range(len(body["documents"]))]
        return {"results": found}


class Sidecar:
    def __init__(self, server: Server) -> None:
        remote = RemoteSettings(url=server.url, probe_s=60)
        settings = Settings(remote=remote, worker=WorkerSettings(engine="openai"))
        self.engine = create_engine(EngineContext(settings, model_dir()))
        self.sink = Recorder()

    async def run(self, work: Work) -> None:
        self.engine.submit(work)
        await eventually(lambda: self.sink.finish(work.request), what="the end")


@pytest_asyncio.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    made = Server(getattr(request, "param", EMBED))
    await made.start()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def sidecar(server: Server) -> AsyncIterator[Sidecar]:
    made = Sidecar(server)
    yield made
    await made.engine.close()


async def test_inputs_are_embedded_in_order(server: Server, sidecar: Sidecar) -> None:
    info = await sidecar.engine.start(sidecar.sink)
    assert (info.task, info.context) == (EMBED, 64)
    await sidecar.run(replace(WORK, tenant="t", salt=7))
    (last,) = sidecar.sink.deltas["r"]
    assert last.finish == "stop"
    assert [array("f", vector).tolist() for vector in last.vectors or []] == [[2, 0.5], [1, 0.5]]
    body = server.bodies[-1]
    assert (body["input"], body["encoding_format"]) == ([[1, 2], [3]], "base64")
    assert "dimensions" not in body
    assert body["cache_salt"]


@pytest.mark.parametrize("server", [SCORE], indirect=True)
async def test_documents_of_one_query_are_sent_together(server: Server, sidecar: Sidecar) -> None:
    assert (await sidecar.engine.start(sidecar.sink)).task == SCORE
    await sidecar.run(replace(WORK, pooling=PAIRS))
    assert [(b["query"], b["documents"]) for b in server.bodies[1:]] == [("q", ["d"]), ("p", ["e"])]
    (last,) = sidecar.sink.deltas["r"]
    assert [array("f", vector).tolist() for vector in last.vectors or []] == [[0.25], [0.25]]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"data": [{"index": 0, "embedding": [1]}]},
        {"data": [{"index": 0, "embedding": "!"}, {"index": 1, "embedding": [1]}]},
        {"data": [{"index": 0, "embedding": "AAA="}, {"index": 1, "embedding": [1]}]},
        {"data": [{"index": 0, "embedding": ["a"]}, {"index": 1, "embedding": [1]}]},
        {"data": 7},
        [],
    ],
)
async def test_an_unreadable_answer_moves_the_work(
    server: Server, sidecar: Sidecar, answer: Any
) -> None:
    await sidecar.engine.start(sidecar.sink)
    server.answer = lambda _: answer
    await sidecar.run(WORK)
    (last,) = sidecar.sink.deltas["r"]
    assert (last.finish, last.vectors) == ("abort", None)
    assert "unreadable answer" in (last.error or "")


@pytest.mark.parametrize(("status", "finish"), [(400, "error"), (503, "abort")])
async def test_errors_are_the_caller_s_or_the_server_s(
    server: Server, sidecar: Sidecar, status: int, finish: str
) -> None:
    await sidecar.engine.start(sidecar.sink)
    server.status, server.answer = status, lambda _: {"error": {"message": "no vectors today"}}
    await sidecar.run(WORK)
    (last,) = sidecar.sink.deltas["r"]
    assert (last.finish, last.invalid) == (finish, status == 400)
    assert "no vectors today" in (last.error or "")


async def test_a_server_that_serves_nothing_is_refused(server: Server, sidecar: Sidecar) -> None:
    server.status = 500
    with pytest.raises(EngineError, match="/v1/completions"):
        await sidecar.engine.start(sidecar.sink)
