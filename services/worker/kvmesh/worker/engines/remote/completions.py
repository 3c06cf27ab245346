"""Requests and chunks of `/v1/completions` with token ids, as vLLM and similar servers serve it."""

from collections.abc import Mapping
from typing import Any

from kvmesh.bus.messages import Work
from kvmesh.worker.adapters.request_streams import EngineUnavailable, StreamOutput, remaining
from kvmesh.worker.adapters.vllm_fields import sampling_fields, structured_outputs
from kvmesh.worker.engine import Rejected

_TOKEN = "token_id:"


def request_fields(
    work: Work, tokens: list[int], model: str, tag: str | None, usage: bool
) -> dict[str, Any]:
    """Body of a streamed completion; `tag` is the cache salt. Raises Rejected.

    `usage` asks for the usage, which ends the stream.
    """
    fields: dict[str, Any] = {
        "model": work.adapter or model,
        "prompt": tokens,
        "stream": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **sampling_parameters(work),
    }
    if tag is not None:
        fields["cache_salt"] = tag
    if work.session is not None:
        fields["session_id"] = work.session
    if usage:
        fields["stream_options"] = {"include_usage": True}
    return fields


def sampling_parameters(work: Work) -> dict[str, Any]:
    """The sampling parameters of what is left to generate; raises Rejected."""
    sampling = remaining(work)
    fields: dict[str, Any] = {"skip_special_tokens": False, **sampling_fields(sampling)}
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.guided is not None:
        fields["structured_outputs"] = structured_outputs(sampling.guided)
    return fields


def read_chunk(chunk: Mapping[str, Any]) -> StreamOutput:
    """Read a server-sent chunk of completions, or of a request with images.

    Raises Rejected or EngineUnavailable for an error chunk.
    """
    if "error" in chunk:
        error = chunk["error"]
        if not isinstance(error, Mapping):
            raise EngineUnavailable(str(error))
        message = str(error.get("message", error))
        if 400 <= int(error.get("code") or 500) < 500:
            raise Rejected(message)
        raise EngineUnavailable(message)
    if not chunk.get("choices"):
        return StreamOutput([], cached=cached_tokens(chunk))
    choice = chunk["choices"][0]
    tokens = choice.get("token_ids")
    if tokens is None:
        raise Rejected("the server sends text without token ids (it ignores return_token_ids)")
    reason = choice.get("finish_reason")
    return StreamOutput(
        tokens,
        None if reason is None else "length" if reason == "length" else "stop",
        logprobs=_logprobs(choice.get("logprobs")),
    )


def cached_tokens(content: Mapping[str, Any]) -> int | None:
    """The cached prompt tokens in the usage of a response or a chunk; None if it has none."""
    usage = content.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    count = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return count if isinstance(count, int) and count >= 0 else None


def _logprobs(logprobs: Mapping[str, Any] | None) -> list[dict[int, float]] | None:
    if logprobs is None:
        return None
    if "content" in logprobs:
        content = logprobs["content"] or []
        return [
            {each["token_id"]: each["logprob"] for each in (*row["top_logprobs"], row)}
            for row in content
        ]
    rows: list[dict[int, float]] = []
    tokens_and_values = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    for (token, value), top in zip(tokens_and_values, logprobs["top_logprobs"], strict=True):
        rows.append({_token(t): p for t, p in (top or {}).items()} | {_token(token): value})
    return rows


def _token(text: str) -> int:
    if not text.startswith(_TOKEN):
        raise Rejected("the server sends log probabilities without token ids")
    return int(text.removeprefix(_TOKEN))
