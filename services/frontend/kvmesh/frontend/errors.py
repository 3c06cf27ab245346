"""Errors of requests, independent of the API that reports them."""

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
    """Base of every error that reaches a client; `param` names the invalid field.

    `retry_after` is in seconds and set only if a retry may succeed. `fatal` asks clients not to
    retry even if the status suggests it.
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
    """Invalid body or header; a retry fails again."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__("invalid_request", message, param=param, code=code)


class ModelNotFound(ApiError):
    """No worker serves `model` or has served it since this frontend started."""

    def __init__(self, model: str) -> None:
        super().__init__(
            "not_found",
            f"The model `{model}` does not exist or you do not have access to it.",
            code="model_not_found",
            param="model",
        )
        self.model = model


class ContextExceeded(ApiError):
    """The prompt (`max_tokens` is None), or prompt plus output, exceeds the context length."""

    def __init__(self, prompt_tokens: int, max_tokens: int | None, context: int) -> None:
        requested = f"{prompt_tokens} tokens in the prompt"
        if max_tokens is not None:
            requested += f" and {max_tokens} for the completion"
        super().__init__(
            "invalid_request",
            f"This model's maximum context length is {context} tokens, but there are {requested}.",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context = context


class Overloaded(ApiError):
    """Everything that could serve the request is at its limit."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__("overloaded", message, code="overloaded", retry_after=retry_after)


class Unavailable(ApiError):
    """Nothing can serve the request now: no worker, no router, or no bus."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__("unavailable", message, code="unavailable", retry_after=retry_after)


class PoisonRequest(ApiError):
    """Two engines were lost while they ran the request; a third is not tried."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "internal",
            f"Two workers stopped responding while they ran the request: {reason}.",
            code="engine_lost",
            fatal=True,
        )
