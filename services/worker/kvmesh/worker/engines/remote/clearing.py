"""Clearing of a server's cache over HTTP, with the outcome that the server reports."""

from typing import Any

from kvmesh.bus.messages import Clear
from kvmesh.worker.adapters.engine_stores import (
    LOWER,
    clear_sglang,
    clear_vllm,
    vllm_stores,
)
from kvmesh.worker.clearing import ENGINE, ClearOutcome, named_tiers
from kvmesh.worker.engine import CLEAR_S, Unsupported
from kvmesh.worker.engines.remote.server import InferenceServer

RESET, FLUSH, STORAGE = "/reset_prefix_cache", "/flush_cache", "/hicache/storage-backend/clear"
TIMEOUT_S = 2.0
NO_PLUGIN = "one namespace needs kvmesh's plugin in the server"
NO_RESET = (
    f"the server has no {RESET}: start vLLM with kvmesh's plugin, or with VLLM_SERVER_DEV_MODE=1"
)


async def clear_vllm_server(server: InferenceServer, command: Clear) -> ClearOutcome:
    """Clear a vLLM without kvmesh's plugin; raises EngineError if it does not reply."""
    tiers = named_tiers(command)
    if command.salt is not None:
        return ClearOutcome(0, {tier: NO_PLUGIN for tier in (ENGINE, *LOWER) if tier in tiers})
    told = await server.arguments()

    async def reset(external: bool) -> bool:
        params = {"reset_external": "true"} if external or not told else {}
        status, body, text = await server.post(RESET, params, TIMEOUT_S)
        if status in (404, 405):
            raise Unsupported(NO_RESET)
        if status != 200:
            raise Unsupported(f"the server replied {status} to {RESET}: {text}")
        return body.get("success") is not False

    try:
        return await clear_vllm(vllm_stores(told.get("kv_transfer_config")), command, reset)
    except Unsupported as error:
        return ClearOutcome(0, {tier: str(error) for tier in (ENGINE, *LOWER) if tier in tiers})


async def clear_sglang_server(server: InferenceServer, command: Clear) -> ClearOutcome:
    """Clear an SGLang server; raises EngineError if it does not reply."""

    async def post(path: str, params: dict[str, str], timeout_s: float) -> str:
        status, _, text = await server.post(path, params, timeout_s)
        return "" if status == 200 else f"the server replied {status} to {path}: {text}"

    async def flush() -> str:
        return await post(FLUSH, {"timeout": str(CLEAR_S - TIMEOUT_S)}, CLEAR_S)

    async def clear_storage() -> str:
        return await post(STORAGE, {}, TIMEOUT_S)

    arguments: dict[str, Any] = await server.arguments()
    return await clear_sglang(arguments, command, flush, clear_storage)
