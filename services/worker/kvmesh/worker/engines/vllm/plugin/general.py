"""vLLM's general plugin `kvmesh`, which vLLM loads in each of its processes."""

import logging

from kvmesh.worker.engines.vllm.kvbm import settings as kvbm
from kvmesh.worker.engines.vllm.retention import settings as retention

CONNECTORS = {retention.CONNECTOR: retention.MODULE, kvbm.CONNECTOR: kvbm.MODULE}


def register() -> None:
    """Let vLLM's options name kvmesh's connectors and load format; log as vLLM does."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvmesh.worker.engines.vllm.weights.loader import register_load_format

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
    register_load_format()
    log = logging.getLogger("kvmesh")
    if not log.hasHandlers():  # not in a worker of kvmesh
        log.parent = logging.getLogger("vllm")
