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
from kvmesh.worker.adapters.request_origin import KEY
from kvmesh.worker.engines.vllm.kvbm.bridge import BridgeOptions, export_bus_options
from kvmesh.worker.engines.vllm.transfer_config import PACKAGE

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
        "kv_connector_module_path": f"{PACKAGE}.kvbm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {KEY: msgspec.to_builtins(options)},
    }


def fingerprint(folder: Path, arguments: list[str]) -> str:
    """Hash of the first HEAD_BYTES of each model file and of vLLM's arguments."""
    digest = xxh3(json.dumps(sorted(arguments)).encode())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        with file.open("rb") as content:
            head = content.read(HEAD_BYTES)
        digest = xxh3(f"{file.name} {file.stat().st_size} ".encode() + head, digest)
    return f"vllm-{digest:016x}"
