"""vLLM's general plugin `kvmesh`, which vLLM loads in each of its processes."""

import logging

from kvmesh.bus.messages import StartPhase
from kvmesh.runtime.process_start import process_created
from kvmesh.worker.engines.vllm.fork_servers.servers import adopt
from kvmesh.worker.engines.vllm.kvbm import settings as kvbm
from kvmesh.worker.engines.vllm.retention import settings as retention
from kvmesh.worker.engines.vllm.start_phases.log_records import observe_records
from kvmesh.worker.engines.vllm.start_phases.sender import listening, record_since

CONNECTORS = {retention.CONNECTOR: retention.MODULE, kvbm.CONNECTOR: kvbm.MODULE}


def register() -> None:
    """Let vLLM's options name kvmesh's connectors and load format, beside each other; log as vLLM.

    If a worker of kvmesh starts this vLLM, tell it the phases of the start.
    """
    adopt()
    if listening():
        record_since(StartPhase.IMPORTS, process_created())
        observe_records()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvmesh.worker.engines.vllm.connectors.vllm_config import extend_configuration
    from kvmesh.worker.engines.vllm.weights.loader import register_load_format

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
    extend_configuration(set(CONNECTORS), retention.CONNECTOR)
    register_load_format()
    log = logging.getLogger("kvmesh")
    if not log.hasHandlers():  # not in a worker of kvmesh
        log.parent = logging.getLogger("vllm")
