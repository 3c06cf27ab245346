"""What the router refuses, and why."""

from kvmesh.bus.messages import Refused


class RouterError(Exception):
    """Base of every error of this package."""


class RouterConfigError(RouterError):
    """A setting of the router is wrong; `key` names it."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"[router] {key}: {reason}")
        self.key = key
        self.reason = reason


class RouteError(RouterError):
    """A request gets no placement; `refusal` is the answer to its sender."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class InvalidRouteRequest(RouteError):
    """The request itself is wrong: sending it again is no use."""

    def __init__(self, reason: str) -> None:
        super().__init__(Refused(code="invalid", reason=reason))


class RouterOverloaded(RouteError):
    """Every worker is busy and no more may wait; `retry_after` is in seconds."""

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(Refused(code="overloaded", reason=reason, retry_after_s=retry_after))


class NoWorkers(RouteError):
    """No worker may take the request, now; `unmet` as `Refused` has it."""

    def __init__(self, reason: str, unmet: bool = False) -> None:
        super().__init__(Refused(code="no_workers", reason=reason, unmet=unmet))
