"""The arguments with which a worker starts SGLang."""

import socket
from pathlib import Path
from typing import Any

from kvmesh.settings.schema import Settings, TransferSettings
from kvmesh.worker.adapters.engine_args import engine_arguments


def server_arguments(settings: Settings, folder: Path) -> dict[str, Any]:
    """SGLang's `ServerArgs`: those that the user gave, and the worker's own."""
    worker, sglang = settings.worker, settings.sglang
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "page_size": worker.block_size,
        "enable_priority_scheduling": True,
        "radix_eviction_policy": "priority",
        "skip_tokenizer_init": False,
        **engine_arguments(sglang.args, sglang.args_file),
    }
    if worker.context:
        arguments.setdefault("context_length", worker.context)
    if worker.serves != "aggregated":
        _disaggregate(arguments, worker.serves, settings.transfer)
    return arguments


def _disaggregate(arguments: dict[str, Any], serves: str, transfer: TransferSettings) -> None:
    """Add the arguments of a prefill or decode worker."""
    arguments.setdefault("disaggregation_mode", serves)
    arguments.setdefault("disaggregation_transfer_backend", "nixl")
    if serves == "prefill":
        arguments.setdefault("host", transfer.host)
        arguments.setdefault("disaggregation_bootstrap_port", transfer.port or _free_port())
    else:
        # SGLang refuses preemption beside the backup of preempted requests in host memory
        arguments.setdefault("disable_priority_preemption", True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
