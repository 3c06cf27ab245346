"""Creates embedded vLLM from the worker's settings: its arguments, adapters and KV connectors."""

import logging
import os
import socket
from math import inf
from typing import Any

import psutil
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform

from kvmesh.worker.adapters.engine_args import engine_arguments
from kvmesh.worker.engine import NO_RETENTION, EngineConfigError, EngineContext
from kvmesh.worker.engines.retention_settings import retention_options
from kvmesh.worker.engines.vllm.adapters import VllmAdapters
from kvmesh.worker.engines.vllm.connectors import offloading
from kvmesh.worker.engines.vllm.engine import VllmEngine
from kvmesh.worker.engines.vllm.kvbm.settings import kvbm_transfer_config
from kvmesh.worker.engines.vllm.lora_arguments import lora_arguments
from kvmesh.worker.engines.vllm.pooling.models import is_pooling
from kvmesh.worker.engines.vllm.retaining_engine import RetainingVllmEngine
from kvmesh.worker.engines.vllm.retention.internals import changed_internals, no_retention
from kvmesh.worker.engines.vllm.retention.settings import retention_transfer_config
from kvmesh.worker.engines.vllm.sleep_mode import sleep_mode
from kvmesh.worker.engines.vllm.tracing import tracing_arguments
from kvmesh.worker.engines.vllm.transfer_config import combined_config, connectors_of
from kvmesh.worker.engines.vllm.weights.options import LOAD_FORMAT, loader_config
from kvmesh.worker.lora.folder import AdapterError, configured_adapters
from kvmesh.worker.model_folder import check_weights

log = logging.getLogger(__name__)
PLUGIN = "kvmesh"
AOT = "VLLM_USE_AOT_COMPILE"
CPU_BLOCK = 32  # tokens
CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"
SIZES = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}
LAZY = f"{offloading.LAZY} follows vLLM's own order of eviction: not with vllm.retention"


def create(context: EngineContext) -> "VllmEngine":
    """Create vLLM with the arguments of `[vllm]` for the model in the folder."""
    worker, vllm = context.settings.worker, context.settings.vllm
    arguments: dict[str, Any] = {
        "model": str(context.folder),
        "block_size": worker.block_size,
        "scheduling_policy": "priority",
        **tracing_arguments(context.settings.tracing),
        **engine_arguments(vllm.args, vllm.args_file),
    }
    if worker.context:
        arguments.setdefault("max_model_len", worker.context)
    served = worker.served_name or context.folder.name
    generates = not is_pooling(arguments)
    if generates:
        arguments.setdefault("enable_prefix_caching", True)
    elif vllm.kvbm:
        raise EngineConfigError("vllm.kvbm is for models that generate text")
    if worker.serves != "aggregated" and generates:
        arguments.setdefault("kv_transfer_config", _nixl_config())
    configured = _configured_connectors(arguments)
    if configured:
        os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_PORT", str(_free_port()))
    ours = []
    if vllm.kvbm:
        ours.append(kvbm_transfer_config(context.settings, context.folder, served))
    retains = vllm.retention and generates
    changed = changed_internals() if retains else []
    engine_type = RetainingVllmEngine if retains and not changed else VllmEngine
    if engine_type.retains:
        ours.append(retention_transfer_config(retention_options(worker)))
        if offloading.is_lazy(configured):
            raise EngineConfigError(LAZY)
    for connector in (*configured, *ours):
        if module := connector.get("kv_connector_module_path"):
            _register(connector["kv_connector"], module)
    holds_memory = bool(configured) or vllm.kvbm
    if configured or ours:
        arguments["kv_transfer_config"] = combined_config(*configured, *ours)
    try:
        adapters = configured_adapters(vllm.adapters)
    except AdapterError as error:
        raise EngineConfigError(str(error)) from error
    _use_weights(arguments, context)
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        _adapt_to_cpu(arguments)
    arguments = lora_arguments(arguments, len(adapters), worker.max_adapters, on_cpu)
    return engine_type(
        arguments,
        VllmAdapters(adapters),
        served,
        worker.compile_timeout_s,
        tiered=vllm.kvbm,
        warnings={NO_RETENTION: no_retention(changed)} if changed else {},
        timeline=context.timeline,
        sleep_mode=sleep_mode(
            arguments, vllm.sleep_level, current_platform.is_sleep_mode_available(), holds_memory
        ),
        servers=context.begun,
        on_refused=context.on_refused,
    )


def _adapt_to_cpu(arguments: dict[str, Any]) -> None:
    # what vLLM compiles ahead of time on a CPU it cannot load, and compiles again
    os.environ.setdefault(AOT, "0")
    arguments["block_size"] = _cpu_block_size(arguments["block_size"])
    if not (SIZES & arguments.keys() or os.environ.get(CPU_SPACE)):
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes()


def _cpu_block_size(size: int) -> int:
    """The block size or the next larger one that attention on a CPU has."""
    possible = -(-size // CPU_BLOCK) * CPU_BLOCK
    if possible != size:
        log.warning("vLLM on a CPU has no blocks of %d tokens: they have %d", size, possible)
    return possible


def _cpu_cache_bytes() -> int:
    """A quarter of the free memory: vLLM's 92 % leaves none to other workers and to trials."""
    size = psutil.virtual_memory().available // 4
    log.warning(
        "vLLM's cache has %.1f GiB, a quarter of the free memory; %s=GiB sets it",
        size / (1 << 30),
        CPU_SPACE,
    )
    return size


def _configured_connectors(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The connectors that the arguments configure; takes vLLM's arguments for offloading away.

    vLLM would put its offloading in the place of all other connectors.
    """
    configured = arguments.get("kv_transfer_config")
    size = arguments.pop(offloading.SIZE, None)
    backend = arguments.pop(offloading.BACKEND, offloading.BACKENDS[0])
    if size is None:
        return offloading.described(connectors_of(configured))
    if type(size) not in (int, float) or not 0 < size < inf:
        raise EngineConfigError(f"{offloading.SIZE} is a number of GiB, not {size!r}")
    if backend not in offloading.BACKENDS:
        known = ", ".join(offloading.BACKENDS)
        raise EngineConfigError(f"{offloading.BACKEND} is one of {known}, not {backend!r}")
    simple = bool(envs.VLLM_USE_SIMPLE_KV_OFFLOAD)
    return offloading.described(offloading.with_offloading(configured, size, backend, simple))


def _use_weights(arguments: dict[str, Any], context: EngineContext) -> None:
    """Let vLLM load the weights that the worker's weights process finds, if there is one."""
    chosen = arguments.get("load_format", "auto")
    if context.weights is None:
        check_weights(arguments["model"], chosen)
        return
    plugins = os.environ.get("VLLM_PLUGINS")
    if chosen not in ("auto", LOAD_FORMAT):
        log.warning("the weights come from no other worker: load_format is %s", chosen)
    elif plugins is not None and PLUGIN not in plugins.split(","):
        log.warning("the weights come from no other worker: VLLM_PLUGINS does not name %s", PLUGIN)
    else:
        given = arguments.get("model_loader_extra_config", {})
        arguments["load_format"] = LOAD_FORMAT
        arguments["model_loader_extra_config"] = {
            **given,
            **loader_config(context.folder, context.weights),
        }


def _register(name: str, module: str) -> None:
    """Register a connector in this process: vLLM finds the statistics of several by name alone."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


def _nixl_config() -> dict[str, str]:
    device = {"kv_buffer_device": "cpu"} if current_platform.is_cpu() else {}
    return {"kv_connector": "NixlConnector", "kv_role": "kv_both", **device}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
