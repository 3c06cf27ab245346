"""Weights for a vLLM server that no worker of ours has started, from the environment."""

import logging
import os
from typing import Any

from kvmesh.worker.engines.vllm.weights.options import LoaderOptions

log = logging.getLogger(__name__)


def server_options(config: Any) -> LoaderOptions | None:
    """Options of the server's own weights process; None, and a line in the log, without one."""
    if not any(name.startswith("KVMESH_") for name in os.environ):
        log.info("no KVMESH_* variables: the weights come from the model's folder")
        return None
    return None
