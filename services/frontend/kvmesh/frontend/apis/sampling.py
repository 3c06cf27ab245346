"""Sampling fields of the OpenAI APIs, and their translation into the internal form."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Literal

from kvmesh.bus.messages import Sampling
from kvmesh.frontend.apis.base import check_length, check_range
from kvmesh.frontend.apis.content.constraints import ConstraintBody
from kvmesh.frontend.apis.content.refusals import UnsupportedFields
from kvmesh.frontend.errors import InvalidRequest

MAX_STOPS = 64
MAX_STOP = 4096  # characters of all stop strings
MAX_TOKENS = 1 << 30
MAX_BIASED = 1024
MAX_DIGITS = 10  # of the id of a token
# Of the vendors' clients. Templates of models that have others read `chat_template_kwargs`.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

UNSUPPORTED = UnsupportedFields(
    prompt_logprobs=None,
    truncate_prompt_tokens=None,
    allowed_token_ids=None,
    bad_words=None,
    stop_regex=None,
    guided_whitespace_pattern=None,
    use_beam_search=None,
    logits_processors=None,
    custom_logit_processor=None,
    lora_path="model",
    include_stop_str_in_output=None,
    no_stop_trim=None,
    stop_sequences="stop",
)

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("min_tokens", 0, MAX_TOKENS),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", -1, MAX_TOKENS),
    ("min_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0, 10),
    ("seed", -(1 << 63), (1 << 63) - 1),
)
_ranged = attrgetter(*(param for param, _, _ in _RANGES))


class SamplingBody(ConstraintBody, kw_only=True):
    """Fields of the OpenAI API, and of vLLM those that agents use, and the UNSUPPORTED ones.

    These are fields of vLLM, SGLang and llama.cpp.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    stop_token_ids: list[int] | None = None
    return_tokens_as_token_ids: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    stop_regex: Any = None
    guided_whitespace_pattern: Any = None
    use_beam_search: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    lora_path: Any = None
    include_stop_str_in_output: Any = None
    no_stop_trim: Any = None
    stop_sequences: Any = None


def to_sampling(body: SamplingBody, max_tokens: int | None, logprobs: int | None) -> Sampling:
    """The internal form; `max_tokens` None: as many as fit. Raises InvalidRequest."""
    _check(body)
    check_range(max_tokens, 1, MAX_TOKENS, "max_tokens")
    if max_tokens is not None:
        check_range(body.min_tokens, 0, max_tokens, "min_tokens")
    return Sampling(
        max_tokens=max_tokens or 0,
        min_tokens=body.min_tokens or 0,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        seed=body.seed,
        stop=stop_strings(body.stop, "stop"),
        stop_token_ids=_stop_tokens(body),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        logit_bias=_bias(body.logit_bias or {}),
    )


def stop_strings(stop: str | Sequence[str | int] | None, param: str) -> list[str]:
    """The texts among stops, which may also be ids of tokens."""
    given = [stop] if isinstance(stop, str) else stop or []
    check_length(len(given), 0, MAX_STOPS, param)
    stops = [text for text in given if isinstance(text, str)]
    if sum(map(len, stops)) > MAX_STOP:
        raise InvalidRequest(f"`{param}` is longer than {MAX_STOP} characters.", param)
    return [text for text in stops if text]


def _stop_tokens(body: SamplingBody) -> list[int]:
    """The ids of tokens that end the answer, in the field of their own and among `stop`."""
    stops = body.stop if isinstance(body.stop, list) else []
    return [*(body.stop_token_ids or []), *(each for each in stops if isinstance(each, int))]


def check_special_tokens(add: bool | None) -> None:
    if add is False:
        reason = "`add_special_tokens`: a prompt always has those of the tokenizer."
        raise InvalidRequest(reason, "add_special_tokens")


def _check(body: SamplingBody) -> None:
    UNSUPPORTED.refuse(body)
    for (param, low, high), value in zip(_RANGES, _ranged(body), strict=True):
        if value is not None:
            check_range(value, low, high, param)
    for param, given in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
        check_length(len(given or ()), 0, MAX_BIASED, param)


def _bias(bias: dict[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, value in bias.items():
        check_range(value, -100, 100, "logit_bias")
        if not token.isdecimal() or len(token) > MAX_DIGITS:
            raise InvalidRequest(f"`logit_bias`: {token!r} is not a valid token id.", "logit_bias")
        found[int(token)] = value
    return found


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
