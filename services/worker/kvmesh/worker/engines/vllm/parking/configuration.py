"""Changes the configuration of a vLLM that is to be parked."""

from typing import Any

from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.engines.vllm.parking.gate import WORKER_CLASS, ParkingGate

OWN_PROCESSES = (None, "mp", "uni")  # executors whose ranks inherit this process's environment


def park_ranks(config: Any, chosen: str, gate: ParkingGate) -> None:
    """Have the ranks of a `VllmConfig` wait at the gate before they take their devices.

    The class of their workers is that of the platform, which `config` names; `chosen` is the option
    `worker_cls`, "auto" for that. Raises EngineConfigError if the ranks cannot wait.
    """
    parallel = config.parallel_config
    if chosen != "auto":
        raise EngineConfigError(f"vLLM with a worker_cls of its own, {chosen}, cannot be parked")
    if parallel.distributed_executor_backend not in OWN_PROCESSES or parallel.nnodes > 1:
        raise EngineConfigError("vLLM can be parked only with all of its ranks on this machine")
    gate.expect(parallel.world_size * parallel.data_parallel_size_local, parallel.worker_cls)
    parallel.worker_cls = WORKER_CLASS
