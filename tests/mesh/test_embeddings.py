"""Vectors and scores over a whole mesh, with clients that know nothing of it."""

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
EMBEDDER, RANKER, CHAT = "embedder", "ranker", "kvmesh-demo"
DOCUMENTS = ["a list of cities", "the capital of France is Paris", "how to cook rice"]
QUERY = "the capital of France"
# Keys by their secrets: the tenant, and limits.
KEYS = {"x": 'tenant = "team-a"', "few": "tokens_per_minute = 60\nconcurrency = 1"}
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def mesh(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    keys = folder / "keys.toml"
    digests = {key: sha256(key.encode()).hexdigest() for key in KEYS}
    tables = (f'[[key]]\nname = "{k}"\nsha256 = "{digests[k]}"\n{v}' for k, v in KEYS.items())
    keys.write_text("\n".join(tables))
    env = {"KVMESH_WORKER_CONTEXT": "2048", "KVMESH_FRONTEND_KEYS_FILE": str(keys)}
    mesh = Mesh(nats_server.url, folder, env)
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0")
    for name, task in ((EMBEDDER, "embed"), (RANKER, "score")):
        for number in (0, 1):
            served = {"KVMESH_WORKER_SERVED_NAME": name, "KVMESH_MOCK_TASK": task}
            mesh.start("worker", f"{name}-{number}", **served)
    mesh.start("worker", "worker-0")
    mesh.start("frontend", "frontend-0")
    yield mesh
    mesh.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[AsyncOpenAI]:
    await mesh.ready()
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="x", max_retries=0) as client:

        async def listed() -> bool:
            return {m.id async for m in client.models.list()} == {EMBEDDER, RANKER, CHAT}

        await eventually(listed, what="all models are served")
        yield client


async def post(mesh: Mesh, path: str, key: str = "x", **body: Any) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.post(mesh.url + path, json=body) as response,
    ):
        return response.status, await response.json()


async def test_vectors_are_the_same_in_both_encodings(client: AsyncOpenAI) -> None:
    floats = await client.embeddings.create(
        model=EMBEDDER, input=["one text", "another"], encoding_format="float"
    )
    packed = await client.embeddings.create(
        model=EMBEDDER, input=["one text", "another"], encoding_format="base64"
    )
    usual = await client.embeddings.create(model=EMBEDDER, input=["one text", "another"])
    assert [row.index for row in floats.data] == [0, 1]
    for one, two, three in zip(floats.data, packed.data, usual.data, strict=True):
        assert len(one.embedding) == 64
        raw: Any = two.embedding
        assert array("f", base64.b64decode(raw)).tolist() == one.embedding == three.embedding
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > 2


async def test_tokens_count_as_their_text(mesh: Mesh, client: AsyncOpenAI) -> None:
    _, found = await post(mesh, "/v1/tokenize", model=EMBEDDER, prompt="one text")
    for tokens in (found["tokens"], [found["tokens"]]):
        ids = await client.embeddings.create(model=EMBEDDER, input=tokens)
        text = await client.embeddings.create(model=EMBEDDER, input="one text")
        assert [row.embedding for row in ids.data] == [row.embedding for row in text.data]


async def test_dimensions_are_passed_on_and_refused_by_the_engine(client: AsyncOpenAI) -> None:
    short = await client.embeddings.create(model=EMBEDDER, input="a", dimensions=8)
    assert len(short.data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError, match="1 to 64"):
        await client.embeddings.create(model=EMBEDDER, input="a", dimensions=65)


async def test_many_inputs_are_shared_out_among_workers(mesh: Mesh, client: AsyncOpenAI) -> None:
    texts = [f"text {number}" for number in range(300)]
    found = await client.embeddings.create(model=EMBEDDER, input=texts)
    alone = await client.embeddings.create(model=EMBEDDER, input=texts[299])
    assert [row.index for row in found.data] == list(range(300))
    assert found.data[299].embedding == alone.data[0].embedding
    served = mesh.worker_metrics()
    worked = [
        name
        for name, value in served.items()
        if name.startswith("kvmesh_worker_requests_total") and value
    ]
    assert len(worked) >= 2


@pytest.mark.parametrize("model", [RANKER, EMBEDDER])
async def test_documents_are_ranked(mesh: Mesh, client: AsyncOpenAI, model: str) -> None:
    status, ranked = await post(
        mesh, "/v1/rerank", model=model, query=QUERY, documents=DOCUMENTS, top_n=2
    )
    assert status == 200
    assert ranked["results"][0]["index"] == 1
    assert ranked["results"][0]["document"] == {"text": DOCUMENTS[1]}
    first, second = (row["relevance_score"] for row in ranked["results"])
    assert first > second
    _, scored = await post(mesh, "/v1/score", model=model, text_1=QUERY, text_2=DOCUMENTS)
    assert scored["data"][1] == {"index": 1, "object": "score", "score": first}
    documents = [{"text": text} for text in DOCUMENTS]
    _, plain = await post(
        mesh,
        "/v2/rerank",
        model=model,
        query=QUERY,
        documents=documents,
        return_documents=False,
    )
    assert plain["results"][0] == {"index": 1, "relevance_score": first}
    assert plain["usage"]["total_tokens"] > 0


async def test_a_long_document_is_cut(mesh: Mesh, client: AsyncOpenAI) -> None:
    body: dict[str, Any] = {"model": RANKER, "query": QUERY, "documents": ["rice " * 5000]}
    status, refused = await post(mesh, "/v1/rerank", **body)
    assert status == 400
    assert refused["error"]["code"] == "context_length_exceeded"
    status, ranked = await post(mesh, "/v1/rerank", **body, max_tokens_per_doc=10)
    assert status == 200
    assert ranked["usage"]["prompt_tokens"] < 20


async def test_inputs_count_against_the_key_and_its_tenant(mesh: Mesh, client: AsyncOpenAI) -> None:
    tokens = 'kvmesh_frontend_tenant_prompt_tokens_total{model="embedder",tenant="team-a"}'
    before = mesh.metrics().get(tokens, 0.0)
    found = await client.embeddings.create(model=EMBEDDER, input=["some words"] * 40)
    assert mesh.metrics()[tokens] - before == found.usage.prompt_tokens
    many: dict[str, Any] = {"key": "few", "model": EMBEDDER, "input": ["some words"] * 40}
    status, _ = await post(mesh, "/v1/embeddings", **many)
    assert status == 200  # one of its sequences, and more tokens than it has
    status, refused = await post(mesh, "/v1/embeddings", **many)
    assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_models_say_what_they_are_for(mesh: Mesh, client: AsyncOpenAI) -> None:
    tasks = {model.id: model.model_dump()["task"] async for model in client.models.list()}
    assert tasks == {EMBEDDER: "embed", RANKER: "score", CHAT: "generate"}
    wrong: list[tuple[str, dict[str, Any], str, str]] = [
        ("/v1/embeddings", {"input": "a"}, CHAT, "generates text"),
        ("/v1/embeddings", {"input": "a"}, RANKER, "scores documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, CHAT, "generates text"),
        ("/v1/chat/completions", CHAT_BODY, EMBEDDER, "embeds texts"),
        ("/v1/completions", {"prompt": "a"}, RANKER, "scores documents"),
        ("/v1/responses", {"input": "a"}, EMBEDDER, "embeds texts"),
    ]
    for path, body, model, words in wrong:
        status, found = await post(mesh, path, model=model, **body)
        assert (status, found["error"]["param"]) == (400, "model"), path
        assert words in found["error"]["message"]
    status, found = await post(mesh, "/v1/messages", model=EMBEDDER, **CHAT_BODY)
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")
    status, found = await post(mesh, "/v2/rerank", model=CHAT, query="a", documents=["b"])
    assert status == 400
    assert set(found) == {"id", "message"}
    status, _ = await post(mesh, "/v1/embeddings", model="none", input="a")
    assert status == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [""]}, "input"),
        ("/v1/embeddings", {"input": [[1], 2]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": [-1]}, "input"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
    ],
)
async def test_a_bad_body_is_refused_by_field(
    mesh: Mesh, client: AsyncOpenAI, path: str, body: dict[str, Any], param: str
) -> None:
    model = EMBEDDER if path == "/v1/embeddings" else RANKER
    status, found = await post(mesh, path, model=model, **body)
    assert (status, found["error"]["param"]) == (400, param)


async def test_a_lost_worker_s_inputs_are_computed_elsewhere(
    mesh: Mesh, client: AsyncOpenAI
) -> None:
    texts = [f"word {number} " * 300 for number in range(64)]
    running = asyncio.create_task(client.embeddings.create(model=EMBEDDER, input=texts))
    mesh.kill(f"{EMBEDDER}-1")
    found = await running
    assert [row.index for row in found.data] == list(range(64))
