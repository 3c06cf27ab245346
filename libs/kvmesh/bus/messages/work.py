"""Work for an engine, and the tokens that come back."""

from typing import Any, Literal

from msgspec import Struct


def owner(tenant: str) -> str:
    """Whose budget a tenant's blocks, pins and prefetches count against.

    A tag is that of an owner, or that and, behind a slash, that of a part of it.
    """
    return tenant.partition("/")[0]


class Guided(Struct, frozen=True, kw_only=True):
    """Constrained decoding: a JSON schema, a regular expression, a grammar or a set of choices."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice", "structural_tag"]
    value: str


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to generate. Names and meanings are those of the OpenAI and vLLM APIs."""

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
    """How dearly tokens `start` to `end` (None: all that follow) of a prompt are kept.

    `priority` is 0 to 100, and what has the highest is evicted last (TensorRT-LLM's meaning and
    default). `ttl_s` counts from each use; None is no deadline. `kind` says what the tokens are:
    "system", "conversation", "tool", "thinking" or "decode". A caller asked for `explicit` ones
    and is told what came of them.
    """

    start: int
    end: int | None = None
    priority: int = 35
    ttl_s: float | None = None
    kind: str = "conversation"
    explicit: bool = False


class Work(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence for an engine. `tokens` is the packed uint32 prompt.

    The last `generated` tokens of the prompt were generated earlier, by a worker that was lost;
    `sampling` speaks of the whole answer, those tokens included, and chunks count from its start.
    `turn` is how many answers of the conversation come before this one. `handoff` is what the
    engine's own KV connector needs to fetch KV that another engine left; with `prefill` the prompt
    alone is computed and its KV left, and the chunk that ends it says in its `handoff` where.
    `tenant` is the tag that isolates its blocks from others', of which `owner` pays for them: no
    two tenants have the same one, while `salt`, with its 64 bits, only finds blocks.
    `retention` speaks of the prompt, later entries win, and `decode` of what will be generated.
    With `base`, a request whose prompt the worker keeps, the prompt is the first `shared` tokens of
    that one and then `tokens`.
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


class WorkReply(Struct, frozen=True, kw_only=True):
    """The worker's immediate answer; tokens follow on the frontend's subject when accepted.

    `status` is "accepted", "busy", "draining", "invalid" or "incomplete"; with one that is not
    known the work is not taken. With `kept` the prompt may be the `base` of later work, until an
    answer is "incomplete": then it is not there any more, and the work must be offered whole. With
    `checking` a chunk follows once the engine has taken it, or refused it.
    """

    status: str
    reason: str = ""
    kept: bool = False
    checking: bool = False


class Chunk(Struct, array_like=True):
    """New tokens of one request, the first of them its `offset`-th (from 0) generated token.

    The first chunk carries `cached` (prompt tokens not computed, per tier); the last one `finish`
    ("stop", "length", "abort" or "error") and, for errors, `error`; that of a prefill for another
    engine also `handoff`, for the `Work` of the one that goes on. `retention` comes with `cached`:
    for each explicit `Retain` of the prompt "honoured", "clipped" or "unsupported". `decode` comes
    with `finish` and says the same of an explicit `Work.decode`. With `invalid` the request was
    refused after it had been accepted, and no worker will take it.
    """

    request: str
    offset: int
    tokens: list[int]
    finish: str | None = None
    error: str | None = None
    cached: list[int] | None = None
    logprobs: list[dict[int, float]] | None = None
    handoff: dict[str, Any] | None = None
    retention: list[str] | None = None
    decode: str | None = None
    invalid: bool = False


class StepOutput(Struct, array_like=True):
    """All that one engine step produced for one frontend."""

    instance: str
    chunks: list[Chunk]
