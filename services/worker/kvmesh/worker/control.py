"""Commands on a worker's control subject."""

from collections.abc import Callable

from kvmesh.bus.messages import (
    Cancel,
    Clear,
    Control,
    ControlReply,
    Drain,
    Pin,
    Prefetch,
    Release,
    Resend,
    Unpin,
)
from kvmesh.worker.capabilities import execute_command
from kvmesh.worker.engine import Engine
from kvmesh.worker.requests.handler import RequestHandler


class ControlHandler:
    """Executes commands on requests, on the engine called `name`, and `Drain` by `on_drain`."""

    def __init__(
        self, engine: Engine, name: str, requests: RequestHandler, on_drain: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._name = name
        self._requests = requests
        self._on_drain = on_drain

    def execute(self, command: Control) -> ControlReply:
        match command:
            case Cancel(request):
                return _request_reply(self._requests.abort(request))
            case Resend(request, offset):
                return _request_reply(self._requests.resend(request, offset))
            case Clear() | Release() | Pin() | Unpin() | Prefetch():
                return execute_command(self._engine, self._name, command)
            case Drain():
                self._on_drain()
        return ControlReply(True)


def _request_reply(known: bool) -> ControlReply:
    return ControlReply(known, "" if known else "no such request here")
