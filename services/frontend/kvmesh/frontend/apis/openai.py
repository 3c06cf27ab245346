"""Errors, usage and events that the OpenAI APIs share."""

from typing import Any

from kvmesh.frontend.apis.base import AnswerSummary, Usage, json_encode
from kvmesh.frontend.apis.faults import INVALID_VALUE
from kvmesh.frontend.errors import STATUS, ApiError, Kind

TYPES: dict[Kind, str] = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "invalid_request_error",
    "method_not_allowed": "invalid_request_error",
    "upgrade_refused": "invalid_request_error",
    "too_large": "invalid_request_error",
    "unsupported_media": "invalid_request_error",
    "rate_limit": "rate_limit_error",
    "overloaded": "overloaded_error",
    "unavailable": "service_unavailable_error",
    "timeout": "timeout_error",
    "internal": "server_error",
}
OVERLOADED = 429
KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def status_of(error: ApiError) -> int:
    """HTTP status; 429 for overload, since OpenAI clients honor retry-after with it."""
    return OVERLOADED if error.kind == "overloaded" else STATUS[error.kind]


def error_object(error: ApiError) -> dict[str, Any]:
    code = error.code
    if code is None and error.kind == "invalid_request" and error.param is not None:
        code = INVALID_VALUE
    return {
        "error": {
            "message": error.message,
            "type": TYPES[error.kind],
            "param": error.param,
            "code": code,
        }
    }


class OpenAIErrorShape:
    """Error responses of the OpenAI APIs."""

    def error(self, error: ApiError, request_id: str) -> tuple[int, bytes]:
        return status_of(error), json_encode(error_object(error))


SHAPE = OpenAIErrorShape()


def usage_object(usage: Usage) -> dict[str, Any]:
    """`usage` of chat and text completions."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def event(value: dict[str, Any]) -> bytes:
    """One unnamed server-sent event."""
    return b"data: " + json_encode(value) + b"\n\n"


def ending(common: dict[str, Any], summary: AnswerSummary, include_usage: bool) -> bytes:
    """The last events of a stream: what the client asked to know of the whole, and the mark."""
    last: dict[str, Any] = {**common, "choices": []}
    if include_usage:
        last["usage"] = usage_object(summary.usage)
    if summary.nvext is not None:
        last["nvext"] = summary.nvext
    wanted = include_usage or summary.nvext is not None
    return (event(last) if wanted else b"") + DONE
