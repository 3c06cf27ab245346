"""What can go wrong with a request, before any API gives it its own shape."""

from typing import Literal

Kind = Literal[
    "invalid_request",
    "authentication",
    "permission",
    "not_found",
    "too_large",
    "rate_limit",
    "overloaded",
    "unavailable",
    "timeout",
    "internal",
]

STATUS: dict[Kind, int] = {
    "invalid_request": 400,
    "authentication": 401,
    "permission": 403,
    "not_found": 404,
    "too_large": 413,
    "rate_limit": 429,
    "overloaded": 529,
    "unavailable": 503,
    "timeout": 504,
    "internal": 500,
}


class ApiError(Exception):
    """Base of every error that reaches a client. `param` names the field at fault.

    `retry_after` is in seconds and set only where trying again may help; with `fatal` clients are
    told not to, though the status may be one at which they usually do.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        fatal: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.fatal = fatal


class InvalidRequest(ApiError):
    """The body or a header is wrong; the same request will fail again."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__("invalid_request", message, param=param, code=code)


class ModelNotFound(ApiError):
    """No worker serves `model`, and none has lately."""

    def __init__(self, model: str) -> None:
        super().__init__(
            "not_found",
            f"The model `{model}` does not exist or you do not have access to it.",
            code="model_not_found",
            param="model",
        )
        self.model = model


class ContextExceeded(ApiError):
    """The prompt alone (`max_tokens` is None), or prompt plus output, do not fit the context."""

    def __init__(self, prompt_tokens: int, max_tokens: int | None, context: int) -> None:
        asked = f"{prompt_tokens} tokens in the prompt"
        if max_tokens is not None:
            asked += f" and {max_tokens} for the completion"
        super().__init__(
            "invalid_request",
            f"This model's maximum context length is {context} tokens, but there are {asked}.",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context = context


class Overloaded(ApiError):
    """Everything that could serve this is at its limit."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__("overloaded", message, code="overloaded", retry_after=retry_after)


class Unavailable(ApiError):
    """Nothing can serve this now: no worker, no router, or no bus."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__("unavailable", message, code="unavailable", retry_after=retry_after)


class Culprit(ApiError):
    """Two engines were lost over this request: no third one is given it."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "internal",
            f"The request was given to two workers, and both stopped answering: {reason}.",
            code="engine_lost",
            fatal=True,
        )
