"""Errors of the router, and the refusals they carry."""

from kvmesh.bus.messages import Refused


class RouterError(Exception):
    """Base of the errors of this package."""


class RouterConfigError(RouterError):
    """An invalid setting of the router; `key` names it."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"[router] {key}: {reason}")
        self.key = key
        self.reason = reason


class RouteError(RouterError):
    """A request gets no placement; `refusal` is the reply to its sender."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class InvalidRouteRequest(RouteError):
    """The request is invalid: sending it again does not help."""

    def __init__(self, reason: str) -> None:
        super().__init__(Refused(code="invalid", reason=reason))


class RouterOverloaded(RouteError):
    """Every worker is busy and the queue is full; `retry_after` is in seconds."""

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(Refused(code="overloaded", reason=reason, retry_after_s=retry_after))


class NoWorkers(RouteError):
    """No worker may run the request at present; `unmet` and `param` are those of `Refused`."""

    def __init__(self, reason: str, param: str = "", unmet: bool = False) -> None:
        super().__init__(Refused(code="no_workers", reason=reason, unmet=unmet, param=param))
