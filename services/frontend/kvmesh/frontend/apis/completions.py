"""POST /v1/completions (OpenAI): text or tokens in, text out, no chat template."""

import codecs
from collections.abc import Callable
from typing import Any

import msgspec

from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.base import (
    AnswerSummary,
    ApiCall,
    Ending,
    Headers,
    RequestStamp,
    SoFar,
    TokenLogprob,
    Usage,
    check_range,
    decode,
    json_encode,
)
from kvmesh.frontend.apis.cache_ttl import CacheOptions, CacheRetention, cache_ttl_s
from kvmesh.frontend.apis.chat.body import MAX_CHOICES
from kvmesh.frontend.apis.content.constraints import constraint
from kvmesh.frontend.apis.content.refusals import UnsupportedFields
from kvmesh.frontend.apis.nvext import Nvext, annotations_of, ignored_fields
from kvmesh.frontend.apis.request_hints import apply_hints, unknown_headers
from kvmesh.frontend.apis.sampling import SamplingBody, check_special_tokens, to_sampling
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.conversation import AnswerEvent, GenerateRequest, TextDelta
from kvmesh.frontend.errors import ApiError, InvalidRequest

DEFAULT_MAX_TOKENS = 16
UNSUPPORTED = UnsupportedFields(
    suffix=None,
    prompt_embeds=None,
    max_completion_tokens="max_tokens",
    max_output_tokens="max_tokens",
)
MAX_LOGPROBS = 20


class CompletionBody(SamplingBody, kw_only=True):
    """Fields of the API. Unknown ones are ignored."""

    model: str
    prompt: str | list[str | int | list[int]]
    n: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: openai.StreamOptions | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: CacheOptions | None = None
    nvext: Nvext | None = None


_decoder = msgspec.json.Decoder(CompletionBody)


class Completions:
    name = "completions"
    id_prefix = "cmpl-"
    keepalive = openai.KEEPALIVE
    in_order = False

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> ApiCall:
        parsed = decode(_decoder, body)
        request = to_request(parsed, self.id_prefix + stamp.token)
        apply_hints(request, headers, parsed.nvext, parsed.prompt_cache_key)
        request.retain_prompt(
            cache_ttl_s(parsed.prompt_cache_retention, parsed.prompt_cache_options)
        )
        if "ignored" in request.extra_fields:
            request.ignored += [
                *ignored_fields(body, CompletionBody, True),
                *unknown_headers(headers),
            ]
        request.annotations = annotations_of(parsed.nvext)
        extras = openai.ChunkExtras(request, parsed.stream_options)
        return ApiCall(request, CompletionAnswer(request, stamp.created, extras))


def to_request(body: CompletionBody, request_id: str) -> GenerateRequest:
    """The internal request; raises InvalidRequest with the invalid field."""
    prompts = text_or_tokens(body.prompt, "prompt")
    check_range(body.n, 1, MAX_CHOICES, "n")
    check_range(body.logprobs, 0, MAX_LOGPROBS, "logprobs")
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise InvalidRequest(f"A request may have at most {MAX_CHOICES} choices.", "prompt")
    UNSUPPORTED.refuse(body)
    check_special_tokens(body.add_special_tokens)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("`best_of` other than `n` is not supported.", "best_of")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("`echo` with `logprobs`: those of a prompt are not computed.", "echo")
    if body.echo and not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequest("`echo` requires text prompts.", "echo")
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return GenerateRequest(
        id=request_id,
        model=body.model,
        sampling=to_sampling(body, limit, body.logprobs),
        prompts=prompts,
        guided=constraint(body),
        token_names=bool(body.return_tokens_as_token_ids),
        stream=bool(body.stream),
        n=body.n or 1,
        echo=bool(body.echo),
    )


def text_or_tokens(prompt: str | list[Any], field: str) -> list[str | list[int]]:
    """The texts and token ids in a `field` of one or several; raises InvalidRequest."""
    if isinstance(prompt, str) or (prompt and all(isinstance(token, int) for token in prompt)):
        prompt = [prompt]
    if not prompt or not all(prompt) or any(isinstance(part, int) for part in prompt):
        raise InvalidRequest(
            f"`{field}` must be a non-empty string, list of strings, list of token ids, or list of"
            " lists of token ids.",
            field,
        )
    return prompt


class CompletionChoice:
    """The text of one choice so far, and the offset of its next token."""

    def __init__(self, index: int, echo: str) -> None:
        self.index = index
        self.text = [echo]
        self.offset = len(echo)
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.logprobs: dict[str, list[Any]] = _no_logprobs()
        self.finish: str | None = None


class CompletionAnswer:
    """Renders chunks and the whole completion."""

    def __init__(self, request: GenerateRequest, created: int, extras: openai.ChunkExtras) -> None:
        self._stream = request.stream
        self._extras = extras
        self._with_logprobs = request.sampling.logprobs is not None
        self._common = {
            "id": request.id,
            "object": "text_completion",
            "created": created,
            "model": request.model,
        }
        self._chunk_common = {**self._common, **extras.common}
        self._choices = [
            CompletionChoice(index, _echoed_prompt(request, index // request.n))
            for index in range(len(request.prompts) * request.n)
        ]

    def begin(self, so_far: SoFar | None = None) -> bytes:
        self._extras.begin(so_far)
        echoes = [self._chunk(c, c.text[0]) for c in self._choices if c.text[0]]
        return b"".join(echoes) or openai.KEEPALIVE

    def started(self, usage: Callable[[], Usage]) -> bytes:
        return b""

    def events(self, choice: int, events: list[AnswerEvent], logprobs: list[TokenLogprob]) -> bytes:
        state = self._choices[choice]
        text = "".join([event.text for event in events if isinstance(event, TextDelta)])
        found = _logprobs(state, logprobs) if self._with_logprobs else None
        if not self._stream:
            state.text.append(text)
            for key, values in (found or {}).items():
                state.logprobs[key] += values
            return b""
        return self._chunk(state, text, found)

    def end(self, choice: int, ending: Ending) -> bytes:
        state = self._choices[choice]
        state.finish = ending.reason
        return self._extras.ended(self._entry(state, "")) if self._stream else b""

    def _chunk(
        self, choice: CompletionChoice, text: str, logprobs: dict[str, list[Any]] | None = None
    ) -> bytes:
        return openai.event({**self._entry(choice, text, logprobs), **self._extras.next()})

    def _entry(
        self, choice: CompletionChoice, text: str, logprobs: dict[str, list[Any]] | None = None
    ) -> dict[str, Any]:
        entry = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish,
        }
        return {**self._chunk_common, "choices": [entry]}

    def done(self, summary: AnswerSummary) -> bytes:
        return self._extras.ending(summary, self._common)

    def failed(self, error: ApiError) -> bytes:
        return openai.event(openai.error_object(error)) + openai.DONE

    def whole(self, summary: AnswerSummary) -> bytes:
        choices = [
            {
                "index": choice.index,
                "text": "".join(choice.text),
                "logprobs": choice.logprobs if self._with_logprobs else None,
                "finish_reason": choice.finish,
            }
            for choice in self._choices
        ]
        usage = openai.usage_object(summary.usage)
        extra = {"nvext": summary.nvext} if summary.nvext is not None else {}
        return json_encode({**self._common, "choices": choices, "usage": usage, **extra})


def _echoed_prompt(request: GenerateRequest, prompt: int) -> str:
    text = request.prompts[prompt]
    return text if request.echo and isinstance(text, str) else ""


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _logprobs(choice: CompletionChoice, tokens: list[TokenLogprob]) -> dict[str, list[Any]]:
    """Log-probabilities as parallel lists."""
    found = _no_logprobs()
    for token in tokens:
        found["tokens"].append(token.token)
        found["token_logprobs"].append(token.logprob)
        # of tokens whose texts look alike, the most likely one counts
        top = {top.token: top.logprob for top in reversed(token.top_logprobs)}
        found["top_logprobs"].append(dict(reversed(top.items())))
        found["text_offset"].append(choice.offset)
        choice.offset += len(choice.decode(bytes(token.bytes)))
    return found
