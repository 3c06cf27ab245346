"""A parsed request for vectors or scores."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from kvmesh.bus.messages import Sampling
from kvmesh.frontend.apis.base import Headers, json_encode
from kvmesh.frontend.apis.request_hints import apply_hints
from kvmesh.frontend.conversation import GenerateRequest

MAX_INPUTS = 2048  # of one request, as the OpenAI API has it
ONE_STEP = Sampling(max_tokens=1)  # of what routers count: a prompt and no output
Render = Callable[[Sequence[bytes], int], Iterator[bytes]]


class PoolingCall(Struct):
    """Texts or token ids to embed, or pairs of a query and a document to score.

    `render` makes the parts of the response body from the packed vectors of the inputs, or the
    scores of the pairs, and the number of prompt tokens. `document_tokens` cuts longer documents.
    """

    request: GenerateRequest
    render: Render
    inputs: list[str | list[int]] = []
    pairs: list[tuple[str, str]] = []
    dimensions: int | None = None
    document_tokens: int | None = None


def pooling_request(request_id: str, model: str, headers: Headers) -> GenerateRequest:
    """The internal request, which has all but the inputs."""
    request = GenerateRequest(id=request_id, model=model, sampling=ONE_STEP)
    apply_hints(request, headers, None, None)
    return request


def usage_of(tokens: int) -> dict[str, int]:
    """The usage of a request whose inputs have so many tokens."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def listed(head: Mapping[str, object], field: str, rows: Iterator[bytes]) -> Iterator[bytes]:
    """The parts of an object with a list of encoded rows in its last `field`."""
    yield json_encode(head)[:-1] + b',"%b":[' % field.encode()
    for number, row in enumerate(rows):
        yield b"," + row if number else row
    yield b"]}"
