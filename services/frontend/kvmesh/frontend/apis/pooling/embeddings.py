"""POST /v1/embeddings (OpenAI): vectors of texts or token ids."""

import base64
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from kvmesh.frontend.apis.base import (
    Headers,
    RequestStamp,
    check_length,
    decode,
    json_encode,
)
from kvmesh.frontend.apis.completions import text_or_tokens
from kvmesh.frontend.apis.content.refusals import UnsupportedFields
from kvmesh.frontend.apis.pooling.call import (
    MAX_INPUTS,
    PoolingCall,
    listed,
    pooling_request,
    usage_of,
)
from kvmesh.frontend.apis.sampling import check_special_tokens
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.errors import InvalidRequest

UNSUPPORTED = UnsupportedFields(truncate_prompt_tokens=None, messages="input")


class EmbeddingsBody(Struct, kw_only=True):
    """Fields of the API. Unknown ones are ignored."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Any = None
    messages: Any = None


_decoder = msgspec.json.Decoder(EmbeddingsBody)


class Embeddings:
    name = "embeddings"
    id_prefix = "embd-"

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> PoolingCall:
        parsed = decode(_decoder, body)
        inputs = text_or_tokens(parsed.input, "input")
        check_length(len(inputs), 1, MAX_INPUTS, "input")
        UNSUPPORTED.refuse(parsed)
        check_special_tokens(parsed.add_special_tokens)
        if parsed.dimensions is not None and parsed.dimensions < 1:
            raise InvalidRequest("`dimensions` must be at least 1.", "dimensions")
        request = pooling_request(self.id_prefix + stamp.token, parsed.model, headers)

        def render(vectors: Sequence[bytes], tokens: int) -> Iterator[bytes]:
            head = {"object": "list", "model": parsed.model, "usage": usage_of(tokens)}
            return listed(head, "data", _rows(vectors, parsed.encoding_format == "base64"))

        return PoolingCall(request, render, inputs=inputs, dimensions=parsed.dimensions)


def _rows(vectors: Sequence[bytes], as_base64: bool) -> Iterator[bytes]:
    for index, vector in enumerate(vectors):
        shown = base64.b64encode(vector).decode() if as_base64 else array("f", vector).tolist()
        yield json_encode({"object": "embedding", "index": index, "embedding": shown})
