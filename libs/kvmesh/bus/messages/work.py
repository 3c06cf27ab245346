"""Work for an engine, and its output tokens."""

from typing import Any, Literal

from msgspec import Struct


def owner(tenant: str) -> str:
    """Return the owner of a tenant tag: its budget is charged for blocks, pins and prefetches.

    A tag is OWNER or OWNER/PART.
    """
    return tenant.partition("/")[0]


def session_owner(session: str) -> str:
    """The owner of a session, from its name on the wire: `TAG`, a separator, and its own name."""
    end = session.find("\x1f")
    return owner(session[:end]) if end > 0 else ""


class Guided(Struct, frozen=True, kw_only=True):
    """Constrained decoding: a JSON schema, a regular expression, a grammar or a set of choices."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice", "structural_tag"]
    value: str


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters, named as in the OpenAI and vLLM APIs."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    guided: Guided | None = None


class Retain(Struct, frozen=True, array_like=True):
    """Retention of tokens `start` to `end` (exclusive; None: all that follow) of a prompt.

    `priority` is 0 to 100; the highest is evicted last (TensorRT-LLM's meaning and default).
    `ttl_s` counts from each use; None sets no deadline. `kind` is the kind of the tokens: "system",
    "conversation", "tool", "thinking" or "decode". `explicit`: the caller requested it, and its
    outcome is reported.
    """

    start: int
    end: int | None = None
    priority: int = 35
    ttl_s: float | None = None
    kind: str = "conversation"
    explicit: bool = False


class Pooling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Vectors or scores to compute of the inputs in the prompt of a `Work`, in place of new tokens.

    `task` is "embed", a vector of each input, or "score", how well each fits: a query, then a
    document. `lengths` are the tokens of each input, in order. `dimensions` is the wanted length of
    the vectors, None for the model's. `seconds` are the places in scored inputs at which the
    document begins, 0 without one, and `pairs` their texts, for engines that take no tokens there.
    """

    task: str
    lengths: list[int]
    dimensions: int | None = None
    seconds: list[int] = []
    pairs: list[tuple[str, str]] = []


class PromptImage(Struct, frozen=True, array_like=True):
    """An image in a prompt, whose tokens are the `length` ones from `start` on.

    `digest` is the SHA-256 of its file. In the prompt its tokens are those of
    `kvmesh.hashing.image_tokens`.
    """

    digest: bytes
    start: int
    length: int


class Work(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence for an engine. `tokens` is the packed uint32 prompt.

    The last `generated` tokens of the prompt were generated before a migration; `sampling` applies
    to the whole output including those tokens, and chunk offsets count from its start. `turn` is
    the number of earlier outputs of the conversation. `handoff` holds the parameters with which the
    engine's KV connector fetches KV from a prefill engine. With `prefill`, the engine computes only
    the prompt and lends its KV; the last chunk carries the `handoff`. `tenant` is the tag that
    isolates blocks, unique per tenant, and `owner(tenant)` is charged for them; the 64-bit `salt`
    only finds blocks. `retention` is for the prompt, where later entries win; `decode` is for the
    generated tokens. With `base`, a request whose prompt the worker has stored, the prompt is the
    first `shared` tokens of that prompt followed by `tokens` (`kvmesh.prompt_delta`). Blocks of
    `ephemeral` work are not written to lower tiers. `conversation` is as in `Hints`.
    `traceparent` is that of a traced request (W3C). Chunks name the request by `ref`, if set: a
    short name within the frontend. Neither name follows from those of the request's other attempts.
    With `pooling`, nothing is generated: the one chunk is the last one, with `vectors`. `images`
    are in the order of the prompt; a worker that lacks the file of one says so in its reply.
    """

    request: str
    frontend: str
    tokens: bytes
    sampling: Sampling
    salt: int = 0
    adapter: str | None = None
    rank: int = 0
    priority: int = 0
    generated: int = 0
    session: str | None = None
    turn: int = 0
    handoff: dict[str, Any] | None = None
    tenant: str = ""
    parent_session: str | None = None
    retention: list[Retain] = []
    decode: Retain | None = None
    prefill: bool = False
    base: str = ""
    shared: int = 0
    traceparent: str = ""
    ephemeral: bool = False
    conversation: int = 0
    ref: str = ""
    pooling: Pooling | None = None
    images: list[PromptImage] = []


class WorkReply(Struct, frozen=True, kw_only=True):
    """The worker's immediate reply; if it accepts, tokens follow on the frontend's subject.

    `status` is "accepted", "busy", "draining", "invalid", "incomplete", "unloaded" if the work's
    adapter has just made room for another, or "images" if the worker lacks the files with the
    digests `missing` (`PutImage`); an unknown status means that the work was not accepted.
    `stored`: the prompt may be the `base` of later work, until a reply is "incomplete": then the
    base was evicted, and the work must be sent with its whole prompt. `checking`: a chunk follows
    once the engine has accepted or refused the work.
    """

    status: str
    reason: str = ""
    stored: bool = False
    checking: bool = False
    missing: list[bytes] = []


class Tokens(Struct, array_like=True):
    """A `Chunk` of tokens alone, without the fields that a decoder fills with their defaults."""

    request: str
    offset: int
    tokens: list[int]


class Chunk(Tokens, array_like=True):
    """New tokens of one request; the first is its generated token number `offset`, from 0.

    `request` is `Work.request`, or `Work.ref` where that is set; the last chunk has the former.
    The first chunk carries `cached`, the cached prompt tokens per tier, and `retention`, one of
    "honoured", "clipped" or "unsupported" for each explicit `Retain` of the prompt. The last chunk
    carries `finish` ("stop", "length", "abort" or "error"), `error` with a reason, `decode`, the
    outcome of an explicit `Work.decode`, `cached` again if that of the first was an estimate, and
    after a prefill `handoff`, for the `Work` of the decode engine. `invalid`: the engine refused
    the request after the worker had accepted it; any worker would refuse it. `device_s`, in the
    first, the last and a few other chunks, is the attempt's share so far of the device time of its
    rank, in device seconds (`kvmesh.worker.requests.device_time`). `waited_s`, in the first chunk
    if the engine reports it, is the time in the engine's queue. `vectors` are those of the inputs
    of a `Work.pooling`, in order, packed as little-endian float32; a score is one of length 1.
    """

    finish: str | None = None
    error: str | None = None
    cached: list[int] | None = None
    logprobs: list[dict[int, float]] | None = None
    handoff: dict[str, Any] | None = None
    retention: list[str] | None = None
    decode: str | None = None
    invalid: bool = False
    device_s: float | None = None
    waited_s: float | None = None
    vectors: list[bytes] | None = None


class StepOutput(Struct, array_like=True):
    """Output of one engine step for one frontend."""

    instance: str
    chunks: list[Chunk]
