"""vLLM's worker of one rank, which waits before it takes its device.

vLLM imports this module by its own option `worker_cls`, in each process of a rank.
"""

import logging
import os
import time
from importlib import import_module
from typing import Any

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname

from kvmesh.bus.messages import StartPhase
from kvmesh.worker.engines.vllm.parking.gate import CLASS_VARIABLE, SOCKET_VARIABLE
from kvmesh.worker.engines.vllm.parking.waiting import wait_at
from kvmesh.worker.engines.vllm.start_phases.sender import record_since

log = logging.getLogger(__name__)
_Base: Any = resolve_obj_by_qualname(os.environ[CLASS_VARIABLE])
# what loading and compiling import, for seconds; no import takes a device
NEEDED_LATER = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "vllm.compilation.backends",
    "vllm.model_executor.model_loader",
)


class ParkedRank(_Base):  # type: ignore[misc]  # known at run time only
    """The platform's worker; `init_device` waits until the worker of kvmesh is promoted."""

    def init_device(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ParkingEnded if the rank is not wanted any more."""
        began = time.monotonic()
        import_ahead(self.model_config)
        record_since(StartPhase.IMPORTS, began)
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
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        log.warning("an import has initialised CUDA: this parked rank may hold device memory")
