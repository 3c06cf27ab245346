"""Configuration of vLLM for sharing its blocks through the node's kvbm."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec

from kvmesh._native import xxh3
from kvmesh.runtime.service import bus_options
from kvmesh.settings.schema import Settings
from kvmesh.worker.adapters.engine_args import engine_arguments
from kvmesh.worker.adapters.request_origin import KEY
from kvmesh.worker.engines.vllm.kvbm.bridge import BridgeOptions, export_bus_options
from kvmesh.worker.engines.vllm.transfer_config import PACKAGE

CONNECTOR = "KvmeshConnector"
HEAD_BYTES = 1 << 20
# arguments of vLLM that change how much or how fast it computes, but not what
NEUTRAL_ARGUMENTS = {
    "api_server_count",
    "compilation_config",
    "disable_log_stats",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_transfer_config",
    "load_format",
    "long_prefill_token_threshold",
    "max_loras",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks_override",
    "scheduling_policy",
    "seed",
    "tensor_parallel_size",
}


def kvbm_transfer_config(settings: Settings, folder: Path, served: str) -> dict[str, Any]:
    """`kv_transfer_config` for `KvmeshConnector`; exports the bus options to it."""
    worker = settings.worker
    export_bus_options(bus_options(settings.nats))
    options = BridgeOptions(
        weights=fingerprint(folder, engine_arguments(settings.vllm.args, settings.vllm.args_file)),
        node=worker.node or os.uname().nodename,
        instance=f"vllm-{secrets.token_hex(4)}",
        model=served,
        lease_s=settings.streams.lease_s,
        wait_s=worker.shared_wait_s,
        queue=worker.write_through_blocks,
    )
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": f"{PACKAGE}.kvbm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {KEY: msgspec.to_builtins(options)},
    }


def fingerprint(folder: Path, arguments: dict[str, Any]) -> str:
    """Hash of the first HEAD_BYTES of each model file, and of the arguments that change KV."""
    changing = {name: arguments[name] for name in arguments.keys() - NEUTRAL_ARGUMENTS}
    digest = xxh3(json.dumps(changing, sort_keys=True).encode())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        with file.open("rb") as content:
            head = content.read(HEAD_BYTES)
        digest = xxh3(f"{file.name} {file.stat().st_size} ".encode() + head, digest)
    return f"vllm-{digest:016x}"
