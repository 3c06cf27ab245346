"""vLLM's general plugin `kvmesh`, which vLLM loads in each of its processes."""

import logging

from kvmesh.worker.engines.vllm.retention.settings import CONNECTOR, MODULE


def register() -> None:
    """Let `--kv-transfer-config` name the connector that retains blocks; log as vLLM does."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    log = logging.getLogger("kvmesh")
    if not log.hasHandlers():  # not in a worker of kvmesh
        log.parent = logging.getLogger("vllm")
