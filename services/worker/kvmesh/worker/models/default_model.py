"""Models for workers that are started without one."""

import logging
from contextlib import ExitStack
from pathlib import Path

from kvmesh.demo import model_dir
from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.scratch import ScratchFolder

log = logging.getLogger(__name__)


def default_model(engine: str, cleanup: ExitStack) -> Path:
    """The model folder for an engine without `worker.model`; `cleanup` removes what is created.

    Raises EngineConfigError if the engine needs a model.
    """
    if engine == "mock":
        return model_dir()
    if engine != "torch":
        raise EngineConfigError(f"the {engine} engine needs a model: --model FOLDER")
    from kvmesh.worker.models.tiny_model import make_tiny_model  # loads numpy

    folder = cleanup.enter_context(ScratchFolder()).path / "tiny"
    log.info("no model given: creating a tiny one with random weights")
    make_tiny_model(folder)
    return folder
