"""What vLLM is told so that its blocks are shared through the node's block manager."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvmesh._native import xxh3
from kvmesh.bus.messages import Work
from kvmesh.runtime.service import bus_options
from kvmesh.settings.schema import Settings
from kvmesh.worker.engines.vllm.bridge import BridgeOptions, RequestOrigin, export_bus_options

KEY = "kvmesh"
CONNECTOR = "KvmeshConnector"
HEAD_BYTES = 1 << 20


def kvbm_transfer_config(settings: Settings, folder: Path, served: str) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for our connector."""
    worker = settings.worker
    export_bus_options(bus_options(settings.nats))
    options = BridgeOptions(
        weights=fingerprint(folder, settings.vllm.args),
        node=worker.node or os.uname().nodename,
        instance=f"vllm-{secrets.token_hex(4)}",
        model=served,
        lease_s=settings.streams.lease_s,
        wait_s=worker.shared_wait_s,
        queue=worker.write_through_blocks,
    )
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "kvmesh.worker.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {KEY: msgspec.to_builtins(options)},
    }


def uses_kvmesh_connector(arguments: dict[str, Any]) -> bool:
    """Whether these engine arguments name our connector."""
    config = arguments.get("kv_transfer_config")
    return isinstance(config, dict) and config["kv_connector"] == CONNECTOR


def kvbm_request_args(work: Work) -> dict[str, Any]:
    """The `extra_args` of a request, from which our connector learns whose blocks they are."""
    retention = list(work.retention)
    if work.decode is not None:
        base = len(work.tokens) // 4 - work.generated
        retention.append(replace(work.decode, start=base, end=None))
    origin = RequestOrigin(
        request=work.request,
        salt=work.salt,
        adapter=work.adapter or "",
        tenant=work.tenant,
        session=work.session,
        retention=retention,
    )
    return {"kv_transfer_params": {KEY: msgspec.to_builtins(origin)}}


def fingerprint(folder: Path, arguments: list[str]) -> str:
    """Tells models apart by the heads of their files and how vLLM is told to run them."""
    digest = xxh3(json.dumps(sorted(arguments)).encode())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        with file.open("rb") as content:
            head = content.read(HEAD_BYTES)
        digest = xxh3(f"{file.name} {file.stat().st_size} ".encode() + head, digest)
    return f"vllm-{digest:016x}"
