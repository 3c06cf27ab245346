"""Preparation for loading a model that needs no device: configuration, code, the page cache."""

import logging
import os
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from kvmesh.worker.engine import EngineConfigError

log = logging.getLogger(__name__)


def prepare_model(folder: Path) -> None:
    """Import the code of the model, and have the kernel read its weights into the page cache.

    Raises EngineConfigError if its configuration cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise EngineConfigError(f"cannot read the config.json of {folder}: {error}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:  # looking it up imports it
        log.debug("no code is known for %s", type(config).__name__)
    else:
        AutoModelForCausalLM._model_mapping[type(config)]
    for file in folder.glob("*.safetensors"):
        _read_ahead(file)


def _read_ahead(file: Path) -> None:
    """Ask the kernel to read a file; it may stop where memory is short."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
    except OSError as error:
        log.debug("cannot read %s ahead: %s", file, error)
