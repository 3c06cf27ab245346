"""Requests and responses of SGLang, for its `/generate` endpoint and its Python engine.

Sources: the sampling-parameter and native-API pages of docs.sglang.io.
"""

from collections.abc import Mapping
from typing import Any

from kvmesh.bus.messages import Guided, Sampling, Work
from kvmesh.worker.adapters.request_streams import EngineUnavailable, StreamOutput, remaining
from kvmesh.worker.adapters.vllm_fields import choice_pattern
from kvmesh.worker.engine import Rejected

_FINISH = {"stop": "stop", "length": "length"}


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters under SGLang's names."""
    fields: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": sampling.stop_token_ids,
        "skip_special_tokens": False,
    }
    if sampling.seed is not None:
        fields["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.guided is not None:
        fields |= _constraint(sampling.guided)
    return fields


def _constraint(guided: Guided) -> dict[str, str]:
    match guided.kind:
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "json_schema":
            return {"json_schema": guided.value}
        case "grammar":
            return {"ebnf": guided.value}
        case "choice":
            return {"regex": choice_pattern(guided.value)}
        case kind:
            return {kind: guided.value}


def request_fields(work: Work, tokens: list[int], tag: str | None) -> dict[str, Any]:
    """The body of one streamed generation; `tag` salts the engine's cache. Raises Rejected."""
    sampling = remaining(work)
    fields: dict[str, Any] = {
        "input_ids": tokens,
        "sampling_params": sampling_fields(sampling),
        "stream": True,
    }
    if sampling.logprobs is not None:
        fields |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
    if work.adapter is not None:
        fields["lora_path"] = work.adapter
    if tag is not None:
        # servers older than cache_salt ignore it; newer ones return only it with their events
        fields |= {"extra_key": tag, "cache_salt": tag}
    return fields


class AnswerReader:
    """Converts the chunks of one response to outputs, whether chunks are cumulative or not.

    A cumulative chunk of the Python engine may already list later tokens: SGLang reuses its list.
    """

    def __init__(self) -> None:
        self._seen = 0

    def read(self, chunk: Mapping[str, Any]) -> StreamOutput:
        """Raises EngineUnavailable or Rejected for a response that the engine aborted."""
        if "error" in chunk:
            raise Rejected(_reason(chunk["error"]))
        meta = chunk["meta_info"]
        first, self._seen = self._seen, meta["completion_tokens"]
        tokens = _new(chunk["output_ids"], first, self._seen)
        reason = meta.get("finish_reason")
        return StreamOutput(
            list(tokens),
            None if reason is None else self._finish(reason),
            meta.get("cached_tokens"),
            _logprobs(meta, first, self._seen) if meta.get("output_token_logprobs") else None,
            below=_below(meta.get("cached_tokens_details") or {}),
        )

    def _finish(self, reason: Mapping[str, Any]) -> str:
        kind = reason["type"]
        if kind == "abort":
            message = reason.get("message") or "the engine aborted the request"
            if 400 <= int(reason.get("status_code") or 500) < 500:
                raise Rejected(message)
            raise EngineUnavailable(message)
        return _FINISH.get(kind, "stop")


def _reason(error: object) -> str:
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)


def _new(items: list[Any], first: int, end: int) -> list[Any]:
    """Items `first` to `end` of an output: of the whole list, or those at the end of a delta."""
    whole = len(items) >= end
    return items[first:end] if whole else items[len(items) - (end - first) :]


def _below(details: Mapping[str, Any]) -> list[int]:
    """Cached tokens that HiCache loaded from the host, from files and from another storage."""
    host, storage = details.get("host") or 0, details.get("storage") or 0
    files = details.get("storage_backend") == "HiCacheFile"
    return [host, storage, 0] if files else [host, 0, storage]


def _logprobs(meta: Mapping[str, Any], first: int, end: int) -> list[dict[int, float]]:
    """Per token, {token: log probability} of the generated token and of the likeliest ones."""
    generated = _new(meta["output_token_logprobs"], first, end)
    likeliest = _new(meta.get("output_top_logprobs") or [None] * end, first, end)
    rows: list[dict[int, float]] = []
    for (logprob, token, *_), top in zip(generated, likeliest, strict=True):
        rows.append({token: logprob} | {t: p for p, t, *_ in top or ()})
    return rows
