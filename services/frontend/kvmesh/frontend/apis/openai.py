"""Errors, usage and events that the OpenAI APIs share."""

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias
from weakref import WeakMethod

from msgspec import Meta, Struct

from kvmesh.frontend.apis.base import AnswerSummary, SoFar, Usage, json_encode
from kvmesh.frontend.apis.faults import INVALID_VALUE
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import STATUS, ApiError, InvalidRequest, Kind

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
WORKER_ID = "worker_id"


Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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


class ChunkExtras:
    """Fields of a stream's chunks beside their choices: usage, and `nvext`.

    The worker is in the first chunk that is sent once it is known, all of `nvext` in the last one
    with choices. With `continuous_usage_stats` each chunk has the usage so far.

    A running request refers to its renderer, so the reference back to it is a weak one: a cycle
    would hold all of an ended request until the garbage collector runs, which takes long then.

    Raises InvalidRequest for the options of a stream in a request without one.
    """

    def __init__(self, request: GenerateRequest, options: StreamOptions | None) -> None:
        if options is not None and not request.stream:
            reason = "`stream_options` is only allowed when `stream` is enabled."
            raise InvalidRequest(reason, "stream_options")
        self.include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._so_far: Callable[[], SoFar | None] = lambda: None
        self._worker = WORKER_ID in request.extra_fields
        self._late = self._continuous or bool(request.extra_fields)
        self._ended: list[dict[str, Any]] = []
        self.pending = self._continuous or self._worker

    @property
    def common(self) -> dict[str, Any]:
        """The fields of each chunk that do not change."""
        return {"usage": None} if self.include_usage and not self._continuous else {}

    def begin(self, so_far: SoFar | None) -> None:
        self.pending = self.pending and so_far is not None
        if self.pending and so_far is not None:
            self._so_far = WeakMethod(so_far)

    def next(self) -> dict[str, Any]:
        """The fields of the next chunk, while they are `pending`."""
        so_far = self._so_far() if self.pending else None
        if so_far is None:
            return {}
        summary, found = so_far(), dict[str, Any]()
        if self._continuous:
            found["usage"] = usage_object(summary.usage)
        worker = (summary.nvext or {}).get(WORKER_ID)
        if self._worker and worker and worker["instance"]:
            found["nvext"] = {WORKER_ID: worker}
            self._worker, self.pending = False, self._continuous
        return found

    def ended(self, chunk: dict[str, Any]) -> bytes:
        """The last chunk of a choice; it waits for the end if the last one of all has extras."""
        if self._late:
            self._ended.append(chunk)
            return b""
        return event(chunk)

    def ending(self, summary: AnswerSummary, common: dict[str, Any]) -> bytes:
        """The end of a stream: chunks that have waited, the usage if asked for, and the mark."""
        usage = usage_object(summary.usage)
        if self._ended:
            own = {"usage": usage} if self._continuous else {}
            extra = {} if summary.nvext is None else {"nvext": summary.nvext}
            self._ended[-1] = {**self._ended[-1], **own, **extra}
        found = b"".join(map(event, self._ended))
        if self.include_usage:
            found += event({**common, "choices": [], "usage": usage})
        return found + DONE
