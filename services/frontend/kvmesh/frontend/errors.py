"""Errors of requests, independent of the API that reports them."""

from collections.abc import Mapping, Sequence
from typing import Literal

Kind = Literal[
    "invalid_request",
    "authentication",
    "permission",
    "not_found",
    "method_not_allowed",
    "upgrade_refused",
    "too_large",
    "unsupported_media",
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
    "method_not_allowed": 405,
    "upgrade_refused": 426,
    "too_large": 413,
    "unsupported_media": 415,
    "rate_limit": 429,
    "overloaded": 529,
    "unavailable": 503,
    "timeout": 504,
    "internal": 500,
}


class ApiError(Exception):
    """Base of every error that reaches a client; `param` names the invalid field.

    `retry_after` is in seconds and set only if a retry may succeed. `fatal` asks clients not to
    retry even if the status suggests it. `headers` say what would be accepted instead.
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
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.fatal = fatal
        self.headers = headers or {}


class InvalidRequest(ApiError):
    """Invalid body or header; a retry fails again."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__("invalid_request", message, param=param, code=code)


class UnsupportedCoding(ApiError):
    """The body has a content coding, or several, that cannot be decoded here."""

    def __init__(self, coding: str, accepted: Sequence[str]) -> None:
        names = ", ".join(accepted)
        super().__init__(
            "unsupported_media",
            f"Content coding `{coding}` is not supported; send one of {names}, or a plain body.",
            headers={"Accept-Encoding": names},
        )


class MethodNotAllowed(ApiError):
    """The path exists, with other methods."""

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        names = ", ".join(allowed)
        super().__init__(
            "method_not_allowed",
            f"{path} has no method {method}, only {names}.",
            code="method_not_supported",
            headers={"Allow": names},
        )


class UpgradeRefused(ApiError):
    """The path exists, but not for WebSockets: clients that try these first go on with HTTP."""

    def __init__(self, path: str, allowed: Sequence[str]) -> None:
        names = ", ".join(allowed)
        super().__init__(
            "upgrade_refused",
            f"{path} does not speak WebSocket; send requests by HTTP ({names}).",
            code="websocket_not_supported",
            headers={"Upgrade": "HTTP/1.1", "Allow": names},
        )


class UpgradeRequired(ApiError):
    """The path and method are those of a WebSocket, which the client has not asked for."""

    def __init__(self, path: str) -> None:
        super().__init__(
            "upgrade_refused",
            f"GET {path} opens a WebSocket; send requests by HTTP with POST.",
            code="upgrade_required",
            headers={"Upgrade": "websocket", "Connection": "Upgrade"},
        )


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


# What models of a task do, and where.
TASKS = {
    "generate": ("generates text", "/v1/chat/completions"),
    "embed": ("embeds texts", "/v1/embeddings"),
    "score": ("scores documents", "/v1/rerank"),
}


class WrongTask(InvalidRequest):
    """The model is for another `task` than the endpoint, which is for models that do `wanted`."""

    def __init__(self, model: str, task: str, wanted: str) -> None:
        does, path = TASKS.get(task, (f"has the task {task}", "no endpoint here"))
        reason = f"The model `{model}` {does} ({path}); this needs one that {TASKS[wanted][0]}."
        super().__init__(reason, "model", "model_not_supported")


class ContextExceeded(ApiError):
    """The prompt (`max_tokens` is None), or prompt plus output, exceeds the context length.

    `at_least`: the prompt has at least `prompt_tokens`, and was not counted to its end.
    """

    def __init__(
        self, prompt_tokens: int, max_tokens: int | None, context: int, at_least: bool = False
    ) -> None:
        requested = f"{'at least ' * at_least}{prompt_tokens} tokens in the prompt"
        if max_tokens is not None:
            requested += f" and {max_tokens} for the completion"
        super().__init__(
            "invalid_request",
            f"This model's maximum context length is {context} tokens, but there are {requested}.",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.at_least = at_least
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
