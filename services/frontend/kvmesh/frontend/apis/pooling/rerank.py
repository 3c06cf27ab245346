"""POST /v1/rerank (as Jina, Cohere and vLLM have it) and /v1/score (vLLM)."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.frontend.apis.base import (
    Headers,
    RequestStamp,
    check_length,
    check_range,
    decode,
    json_encode,
    missing,
)
from kvmesh.frontend.apis.content.refusals import UnsupportedFields
from kvmesh.frontend.apis.openai import status_of
from kvmesh.frontend.apis.pooling.call import (
    MAX_INPUTS,
    PoolingCall,
    listed,
    pooling_request,
    usage_of,
)
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.errors import ApiError, InvalidRequest

UNSUPPORTED = UnsupportedFields(
    truncate_prompt_tokens="max_tokens_per_doc", max_chunks_per_doc=None
)
MAX_TOKENS = 1 << 31
MAX_CHARACTERS = 16 << 20  # of all pairs, for each of which a query is tokenized and computed


class RerankDocument(Struct):
    """A document that is an object, as some clients send it."""

    text: str


class _ScoringBody(Struct, kw_only=True):
    model: str
    max_tokens_per_doc: int | None = None
    truncate_prompt_tokens: Any = None
    max_chunks_per_doc: Any = None


class RerankBody(_ScoringBody, kw_only=True):
    """Fields of the API. Unknown ones are ignored."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreBody(_ScoringBody, kw_only=True):
    """Fields of the API, of which `queries` and `documents` are other names of the texts."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


_rerank = msgspec.json.Decoder(RerankBody)
_score = msgspec.json.Decoder(ScoreBody)


class Rerank:
    name = "rerank"
    id_prefix = "rerank-"

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> PoolingCall:
        parsed = decode(_rerank, body)
        texts = [d if isinstance(d, str) else d.text for d in parsed.documents]
        pairs = [(parsed.query, text) for text in texts]
        _check(parsed, pairs, "query", "documents")
        check_range(parsed.top_n, 0, MAX_TOKENS, "top_n")
        request = pooling_request(self.id_prefix + stamp.token, parsed.model, headers)
        shown = parsed.return_documents is not False

        def render(vectors: Sequence[bytes], tokens: int) -> Iterator[bytes]:
            scores = list(map(_value, vectors))
            order = sorted(range(len(scores)), key=lambda index: -scores[index])
            head = {
                "id": request.id,
                "object": "list",
                "model": parsed.model,
                "usage": usage_of(tokens),
            }
            best = order[: parsed.top_n or None]
            return listed(head, "results", (_result(i, scores[i], texts, shown) for i in best))

        return PoolingCall(
            request, render, pairs=pairs, document_tokens=parsed.max_tokens_per_doc or None
        )


class CohereRerank(Rerank):
    """The same at the path of Cohere's clients, with their errors."""

    name = "rerank-v2"


class CohereErrorShape:
    """Error responses as Cohere's clients know them."""

    def error(self, error: ApiError, request_id: str) -> tuple[int, bytes]:
        return status_of(error), json_encode({"id": request_id, "message": error.message})


COHERE = CohereErrorShape()


class Score:
    name = "score"
    id_prefix = "score-"

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> PoolingCall:
        parsed = decode(_score, body)
        first, queries = _texts(parsed, "text_1", "queries")
        second, documents = _texts(parsed, "text_2", "documents")
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            reason = f"`{first}` has one text or as many as `{second}`."
            raise InvalidRequest(reason, first)
        pairs = list(zip(queries, documents, strict=True))
        _check(parsed, pairs, first, second)
        request = pooling_request(self.id_prefix + stamp.token, parsed.model, headers)

        def render(vectors: Sequence[bytes], tokens: int) -> Iterator[bytes]:
            head = {
                "id": request.id,
                "object": "list",
                "created": stamp.created,
                "model": parsed.model,
                "usage": usage_of(tokens),
            }
            rows = (
                json_encode({"index": index, "object": "score", "score": _value(vector)})
                for index, vector in enumerate(vectors)
            )
            return listed(head, "data", rows)

        return PoolingCall(
            request, render, pairs=pairs, document_tokens=parsed.max_tokens_per_doc or None
        )


def _texts(body: ScoreBody, *names: str) -> tuple[str, list[str]]:
    """The field that is set, and its texts."""
    for name in names:
        value = getattr(body, name)
        if value is not None:
            return name, [value] if isinstance(value, str) else value
    raise missing(names[0])


def _check(body: _ScoringBody, pairs: list[tuple[str, str]], query: str, documents: str) -> None:
    check_length(len(pairs), 1, MAX_INPUTS, documents)
    if not all(text for text, _ in pairs):
        raise InvalidRequest(f"`{query}` must not be empty.", query)
    if sum(len(first) + len(second) for first, second in pairs) > MAX_CHARACTERS:
        reason = f"The pairs of `{query}` and `{documents}` have more than {MAX_CHARACTERS}"
        raise InvalidRequest(f"{reason} characters together.", query)
    UNSUPPORTED.refuse(body)
    check_range(body.max_tokens_per_doc, 0, MAX_TOKENS, "max_tokens_per_doc")


def _result(index: int, score: float, texts: Sequence[str], shown: bool) -> bytes:
    document = {"document": {"text": texts[index]}} if shown else {}
    return json_encode({"index": index, "relevance_score": score, **document})


def _value(vector: bytes) -> float:
    return array("f", vector)[0]
