"""Request fields under vLLM's names, for its Python API and its HTTP server."""

import json
import re
from typing import Any

from kvmesh.bus.messages import Guided, Sampling
from kvmesh.worker.engine import Rejected


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters under vLLM's names; the frontend matches stop strings itself."""
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": sampling.stop_token_ids,
    }
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.logprobs is not None:
        fields["logprobs"] = sampling.logprobs
    return fields


def structured_outputs(guided: Guided) -> dict[str, Any]:
    """The one field of vLLM's structured-outputs parameters that a constraint sets."""
    match guided.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": guided.value}
        case "choice":
            return {"choice": choices(guided.value)}
        case kind:
            return {kind: guided.value}


def choices(value: str) -> list[str]:
    """The alternatives of a choice, a JSON array of strings; raises Rejected."""
    try:
        found = json.loads(value)
    except ValueError as error:
        raise Rejected(f"choice is not JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise Rejected("choice is not a list of strings")
    return found


def choice_pattern(value: str) -> str:
    """The regular expression of a choice, for engines that have no other form of it."""
    return "|".join(re.escape(choice) for choice in choices(value))
