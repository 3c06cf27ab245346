"""Configuration of vLLM for sharing its blocks through the node's kvbm."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvmesh._native import xxh3
from kvmesh.runtime.service import bus_options
from kvmesh.settings import Settings, load
from kvmesh.tracing.endpoint import turned_on
from kvmesh.worker.adapters.engine_args import engine_arguments
from kvmesh.worker.adapters.request_origin import KEY
from kvmesh.worker.engines.vllm.kvbm.bridge import BridgeOptions, export_bus_options
from kvmesh.worker.engines.vllm.tracing import export_headers
from kvmesh.worker.engines.vllm.transfer_config import PACKAGE

CONNECTOR = "KvmeshConnector"
MODULE = f"{PACKAGE}.kvbm.connector"
HEAD_BYTES = 1 << 20
FLUSH_S = 3.0  # vLLM kills a worker process 5 s after it should have ended
# arguments of vLLM that change how much or how fast it computes, but not what
NEUTRAL_ARGUMENTS = {
    "api_server_count",
    "compilation_config",
    "disable_log_stats",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_offloading_backend",
    "kv_offloading_size",
    "kv_transfer_config",
    "load_format",
    "long_prefill_token_threshold",
    "max_loras",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "model_loader_extra_config",
    "num_gpu_blocks_override",
    "scheduling_policy",
    "seed",
    "tensor_parallel_size",
}


def kvbm_transfer_config(settings: Settings, folder: Path, served: str) -> dict[str, Any]:
    """`kv_transfer_config` for `KvmeshConnector`; exports the bus options to it."""
    export_bus_options(bus_options(settings.nats))
    arguments = engine_arguments(settings.vllm.args, settings.vllm.args_file)
    instance = f"vllm-{secrets.token_hex(4)}"
    options = _options(settings, fingerprint(folder, arguments, instance), instance, served)
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {KEY: msgspec.to_builtins(options)},
    }


def server_options(config: Any) -> BridgeOptions:
    """Options in a vLLM server that no worker has started, from `VllmConfig` and the environment.

    The variables are those of a worker; exports the bus options. Each process of the server gets
    the same. Raises SettingsError, or ValueError for a model that is not a folder.
    """
    settings, model = load(None, os.environ, {}), config.model_config
    folder = Path(model.model)
    if not folder.is_dir():
        raise ValueError(f"{CONNECTOR} needs the model as a folder; {model.model!r} is none")
    export_bus_options(bus_options(settings.nats))
    arguments = {"model": model.compute_hash(), "cache": config.cache_config.compute_hash()}
    instance = f"vllm-{xxh3(str(config.kv_transfer_config.engine_id).encode()):016x}"
    served = settings.worker.served_name or folder.name
    return _options(settings, fingerprint(folder, arguments, instance), instance, served)


def _options(settings: Settings, weights: str, instance: str, served: str) -> BridgeOptions:
    worker, tracing = settings.worker, settings.tracing
    export_headers(tracing)
    return BridgeOptions(
        weights=weights,
        node=worker.node or os.uname().nodename,
        instance=instance,
        model=served,
        lease_s=settings.streams.lease_s,
        wait_s=worker.shared_wait_s,
        queue=worker.write_through_blocks,
        flush_s=min(worker.drain_blocks_s, FLUSH_S),
        tracing=replace(tracing, headers=None) if turned_on(tracing) else None,
    )


def fingerprint(folder: Path, arguments: dict[str, Any], instance: str) -> str:
    """Hash of the first HEAD_BYTES of each model file, and of the arguments that change KV.

    Weights that come from elsewhere are unknown: only this instance shares the blocks then.
    """
    changing = {name: arguments[name] for name in arguments.keys() - NEUTRAL_ARGUMENTS}
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        changing["instance"] = instance
    digest = xxh3(json.dumps(changing, sort_keys=True).encode())
    for file in sorted([*weights, *folder.glob("*.json")]):
        with file.open("rb") as content:
            head = content.read(HEAD_BYTES)
        digest = xxh3(f"{file.name} {file.stat().st_size} ".encode() + head, digest)
    return f"vllm-{digest:016x}"
