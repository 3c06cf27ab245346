"""vLLM's worker of one rank, which waits before it takes its device.

vLLM imports this module by its own option `worker_cls`, in each process of a rank.
"""

import logging
import os
import socket
from importlib import import_module
from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname

from kvmesh.worker.engines.vllm.parking.gate import CLASS_VARIABLE, GO, SOCKET_VARIABLE

log = logging.getLogger(__name__)
_Base: Any = resolve_obj_by_qualname(os.environ[CLASS_VARIABLE])
# what loading and compiling import, for seconds; no import takes a device
NEEDED_LATER = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "vllm.compilation.backends",
    "vllm.model_executor.model_loader",
)


class TurnedAway(Exception):
    """The worker that started this rank is gone, or does not want it any more."""


class ParkedRank(_Base):  # type: ignore[misc]  # known at run time only
    """The platform's worker; `init_device` waits until the worker of kvmesh is promoted."""

    def init_device(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TurnedAway if the rank is not wanted any more."""
        import_ahead(self.model_config)
        wait_at(os.environ[SOCKET_VARIABLE])
        return super().init_device(*args, **kwargs)


def import_ahead(model_config: Any) -> None:
    """Import what the rank will need; what fails here is imported, or fails, later."""
    for module in NEEDED_LATER:
        try:
            import_module(module)
        except ImportError as error:
            log.debug("not imported ahead: %s", error)
    try:
        from vllm.model_executor.model_loader.utils import get_model_architecture

        get_model_architecture(model_config)
    except Exception as error:  # vLLM raises any type
        log.debug("the model's code is not imported ahead: %r", error)


def wait_at(path: str) -> None:
    """Wait without a limit for leave to go on; raises TurnedAway."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.connect(path)
            if channel.recv(len(GO), socket.MSG_WAITALL) == GO:
                return
    except OSError as error:
        raise TurnedAway(f"the parked worker is gone: {error}") from error
    raise TurnedAway("the worker that parked this rank is gone, or ends it")
