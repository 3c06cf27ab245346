"""vLLM's pooling models behind the whole mesh, beside what transformers computes."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engines.test_vllm_mesh import post
from support.mesh import Mesh
from support.nats import NatsServer
from support.pooling_models import embedding, make_bert, make_decoder, score
from support.vllm_server import VllmServer, vllm_server
from support.wait import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),
]
START_S = 600
ARGS = "enforce_eager=true,dtype=float32"
QUERY = "the capital of france"
DOCUMENTS = ["a list of cities", "paris is the capital", "how to cook rice", ""]
ENCODER, RANKER, DECODER = "encoder", "ranker", "decoder"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        ENCODER: make_bert(root / ENCODER, scores=False),
        RANKER: make_bert(root / RANKER, scores=True),
        DECODER: make_decoder(root / DECODER),
    }


@pytest.fixture(scope="module")
def mesh(
    nats_server: NatsServer, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mesh]:
    settings = {
        "KVMESH_WORKER_ENGINE": "vllm",
        "KVMESH_WORKER_BLOCK_SIZE": "32",
        "KVMESH_VLLM_ARGS": ARGS,
    }
    made = Mesh(nats_server.url, tmp_path_factory.mktemp("mesh"), settings)
    made.start("indexer", "indexer-0")
    made.start("router", "router-0")
    for name, folder in folders.items():
        made.start("worker", name, KVMESH_WORKER_MODEL=str(folder))
    made.start("frontend", "frontend-0")
    yield made
    made.stop()


async def ready(mesh: Mesh, models: int = 3) -> None:
    await mesh.ready(START_S)
    await eventually(lambda: len(listed(mesh)) == models, timeout=START_S, what="all are served")


def listed(mesh: Mesh) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{mesh.url}/v1/models", timeout=60) as answer:
        return list(json.load(answer)["data"])


def embed(mesh: Mesh, model: str, **body: Any) -> list[list[float]]:
    found = post(mesh, "/v1/embeddings", {"model": model, **body})
    return [row["embedding"] for row in found["data"]]


@pytest.mark.parametrize(("model", "place"), [(ENCODER, 0), (DECODER, -1)])
async def test_vectors_are_those_of_the_model(
    mesh: Mesh, folders: dict[str, Path], model: str, place: int
) -> None:
    await ready(mesh)
    texts = [text for text in DOCUMENTS if text] * 12  # more than one group
    wanted = {text: embedding(folders[model], text, place) for text in set(texts)}
    for text, found in zip(texts, embed(mesh, model, input=texts), strict=True):
        assert found == pytest.approx(wanted[text], abs=1e-4)


async def test_dimensions_are_the_model_s_decision(mesh: Mesh) -> None:
    await ready(mesh)
    (short,) = embed(mesh, DECODER, input="paris", dimensions=16)
    assert len(short) == 16
    assert sum(value * value for value in short) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(OSError, match="400"):
        embed(mesh, ENCODER, input="paris", dimensions=16)


async def test_scores_are_those_of_the_model(mesh: Mesh, folders: dict[str, Path]) -> None:
    await ready(mesh)
    body = {"model": RANKER, "query": QUERY, "documents": DOCUMENTS}
    found = {r["index"]: r["relevance_score"] for r in post(mesh, "/v1/rerank", body)["results"]}
    wanted = [score(folders[RANKER], QUERY, document) for document in DOCUMENTS]
    assert [found[index] for index in range(len(DOCUMENTS))] == pytest.approx(wanted, abs=1e-4)
    assert len(set(wanted)) == len(wanted)


async def test_tokens_beyond_the_vocabulary_are_refused(mesh: Mesh) -> None:
    await ready(mesh)
    with pytest.raises(OSError, match="400"):
        embed(mesh, DECODER, input=[1 << 20])
    assert embed(mesh, DECODER, input=[1])


@pytest.fixture(scope="module")
def servers(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, VllmServer]]:
    with ExitStack() as started:
        yield {
            name: started.enter_context(vllm_server(folders[name], tmp_path_factory.mktemp(name)))
            for name in (RANKER, DECODER)
        }


async def test_servers_beside_a_worker_give_the_same(
    mesh: Mesh, folders: dict[str, Path], servers: dict[str, VllmServer]
) -> None:
    for name, server in servers.items():
        await server.ready()
        variables = {
            "KVMESH_WORKER_ENGINE": "openai",
            "KVMESH_WORKER_MODEL": str(folders[name]),
            "KVMESH_WORKER_SERVED_NAME": f"served-{name}",
            "KVMESH_REMOTE_URL": server.url,
        }
        mesh.start("worker", f"served-{name}", **variables)
    await ready(mesh, models=5)
    texts = [text for text in DOCUMENTS if text] * 6
    for wanted, found in zip(
        embed(mesh, DECODER, input=texts),
        embed(mesh, f"served-{DECODER}", input=texts),
        strict=True,
    ):
        assert found == pytest.approx(wanted, abs=1e-5)
    assert len(embed(mesh, f"served-{DECODER}", input="paris", dimensions=16)[0]) == 16
    # transformers leaves the separator out behind an empty document, and so does the server
    body = {"query": QUERY, "documents": [text for text in DOCUMENTS if text]}
    own, served = (
        post(mesh, "/v1/rerank", {"model": model, **body})["results"]
        for model in (RANKER, f"served-{RANKER}")
    )
    assert [row["index"] for row in served] == [row["index"] for row in own]
    wanted = [row["relevance_score"] for row in own]
    assert [row["relevance_score"] for row in served] == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(OSError, match="400"):
        embed(mesh, f"served-{DECODER}", input=[1 << 20])
