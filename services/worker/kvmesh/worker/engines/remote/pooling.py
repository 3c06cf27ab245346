"""Vectors and scores from the `/v1/embeddings` and `/v1/rerank` of an inference server."""

import base64
import binascii
from array import array
from collections.abc import AsyncGenerator
from itertools import groupby
from operator import itemgetter
from typing import Any

import aiohttp
import numpy as np

from kvmesh.bus.errors import cause
from kvmesh.bus.messages import EMBED, SCORE, Pooling, Work
from kvmesh.settings import redacted
from kvmesh.worker.adapters.request_streams import EngineUnavailable, StreamOutput
from kvmesh.worker.engines.remote.answers import check

PATHS = {EMBED: "/v1/embeddings", SCORE: "/v1/rerank"}
PROBES: dict[str, dict[str, Any]] = {
    EMBED: {"input": [[1]]},
    SCORE: {"query": "a", "documents": ["a"]},
}
PROBE_S = 30.0


async def pooling_task(http: aiohttp.ClientSession, url: str, model: str) -> str:
    """The task of a server's model that generates no text; empty if it serves none."""
    timeout = aiohttp.ClientTimeout(PROBE_S)
    for task, path in PATHS.items():
        body = {"model": model, **PROBES[task]}
        try:
            async with http.post(url + path, json=body, timeout=timeout) as response:
                if response.status == 200:
                    return task
        except (aiohttp.ClientError, TimeoutError):
            continue
    return ""


async def pooled(
    http: aiohttp.ClientSession, url: str, common: dict[str, Any], work: Work, pooling: Pooling
) -> AsyncGenerator[StreamOutput, None]:
    """The vectors of a work's inputs, by bodies with the `common` fields.

    Raises Rejected or EngineUnavailable.
    """
    url += PATHS[pooling.task]
    try:
        if pooling.task == EMBED:
            vectors = _embeddings(await _post(http, url, common | _inputs(work, pooling)))
        else:
            vectors = []
            for query, pairs in groupby(pooling.pairs, itemgetter(0)):
                documents = [document for _, document in pairs]
                body = {"query": query, "documents": documents}
                vectors += _scores(await _post(http, url, common | body), len(documents))
        if len(vectors) != len(pooling.lengths):
            raise ValueError(f"{len(vectors)} vectors for {len(pooling.lengths)} inputs")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineUnavailable(redacted(f"{url}: {cause(error)}")) from error
    except (LookupError, TypeError, ValueError) as error:
        raise EngineUnavailable(redacted(f"{url}: unreadable answer: {error!r}")) from error
    yield StreamOutput([], "stop", vectors=vectors)


async def _post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with http.post(url, json=body) as response:
        await check(response)
        return await response.json()


def _inputs(work: Work, pooling: Pooling) -> dict[str, Any]:
    tokens, inputs, start = array("I", work.tokens), [], 0
    for length in pooling.lengths:
        inputs.append(tokens[start : start + length].tolist())
        start += length
    wanted = {} if pooling.dimensions is None else {"dimensions": pooling.dimensions}
    return {"input": inputs, "encoding_format": "base64", **wanted}


def _embeddings(answer: Any) -> list[bytes]:
    rows = sorted(answer["data"], key=itemgetter("index"))
    return [_vector(row["embedding"]) for row in rows]


def _vector(embedding: Any) -> bytes:
    """A vector in base64, or as numbers: some servers know no other form."""
    if not isinstance(embedding, str):
        return bytes(np.array(embedding, "<f4").tobytes())
    try:
        found = base64.b64decode(embedding, validate=True)
    except binascii.Error as error:
        raise ValueError("an embedding is not base64") from error
    if not found or len(found) % 4:
        raise ValueError(f"an embedding has {len(found)} bytes")
    return found


def _scores(answer: Any, count: int) -> list[bytes]:
    by_index = {row["index"]: float(row["relevance_score"]) for row in answer["results"]}
    return [np.array([by_index[index]], "<f4").tobytes() for index in range(count)]
