"""Models for workers that are started without one."""

import logging
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from kvmesh.demo import model_dir
from kvmesh.worker.engine import EngineConfigError, not_installed
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
    try:
        tiny = import_module("kvmesh.worker.engines.torch.model.tiny")
    except ModuleNotFoundError as error:
        raise not_installed(engine, error) from error
    folder = cleanup.enter_context(ScratchFolder()).path / "tiny"
    log.info("no model given: creating a tiny one with random weights")
    tiny.make_tiny_model(folder)
    return folder
