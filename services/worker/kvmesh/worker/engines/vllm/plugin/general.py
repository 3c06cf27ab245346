"""vLLM's general plugin `kvmesh`, which vLLM loads in each of its processes."""

import logging

from kvmesh.worker.engines.vllm.kvbm import settings as kvbm
from kvmesh.worker.engines.vllm.retention import settings as retention

CONNECTORS = {retention.CONNECTOR: retention.MODULE, kvbm.CONNECTOR: kvbm.MODULE}


def register() -> None:
    """Let `--kv-transfer-config` name kvmesh's connectors; log as vLLM does."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
    log = logging.getLogger("kvmesh")
    if not log.hasHandlers():  # not in a worker of kvmesh
        log.parent = logging.getLogger("vllm")
