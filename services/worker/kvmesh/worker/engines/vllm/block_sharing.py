"""Configuration of vLLM for sharing its blocks through the node's kvbm."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvmesh._native import xxh3
from kvmesh.bus.messages import Work
from kvmesh.hashing import TOKEN_BYTES
from kvmesh.runtime.service import bus_options
from kvmesh.settings.schema import Settings
from kvmesh.worker.engines.vllm.bridge import BridgeOptions, RequestOrigin, export_bus_options

KEY = "kvmesh"
CONNECTOR = "KvmeshConnector"
HEAD_BYTES = 1 << 20


def kvbm_transfer_config(settings: Settings, folder: Path, served: str) -> dict[str, Any]:
    """`kv_transfer_config` for `KvmeshConnector`; exports the bus options to it."""
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
    """True if these engine arguments configure `KvmeshConnector`."""
    config = arguments.get("kv_transfer_config")
    return isinstance(config, dict) and config["kv_connector"] == CONNECTOR


def kvbm_request_args(work: Work) -> dict[str, Any]:
    """`extra_args` of a request: the origin of its blocks for `KvmeshConnector`."""
    retention = list(work.retention)
    if work.decode is not None:
        prompt = len(work.tokens) // TOKEN_BYTES - work.generated
        retention.append(replace(work.decode, start=prompt, end=None))
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
    """Hash of the first HEAD_BYTES of each model file and of vLLM's arguments."""
    digest = xxh3(json.dumps(sorted(arguments)).encode())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        with file.open("rb") as content:
            head = content.read(HEAD_BYTES)
        digest = xxh3(f"{file.name} {file.stat().st_size} ".encode() + head, digest)
    return f"vllm-{digest:016x}"
