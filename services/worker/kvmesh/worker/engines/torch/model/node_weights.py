"""Weights of the torch engine from the memory of its node."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import __version__ as transformers_version
from transformers.initialization import no_init_weights

from kvmesh.weights.answer import WeightsAccess
from kvmesh.weights.errors import WeightsError, WeightsLost
from kvmesh.weights.manifest import TensorEntry
from kvmesh.worker.adapters.weights.arriving_tensors import ArrivingTensors
from kvmesh.worker.adapters.weights.engine_form import (
    FormKey,
    distinct_tensors,
    fill,
    find_form,
    form_key,
    keep_form,
)
from kvmesh.worker.adapters.weights.linked_folder import LinkedModel
from kvmesh.worker.adapters.weights.mapped_tensors import DTYPES
from kvmesh.worker.adapters.weights.node_copy import NodeCopy
from kvmesh.worker.engines.torch.model.attention import NAME

log = logging.getLogger(__name__)
ENGINE = "torch"


class ArrivingTensor:
    """A tensor that is read, and waited for, where transformers reads a slice of a file."""

    def __init__(self, tensors: ArrivingTensors, entry: TensorEntry) -> None:
        self._tensors = tensors
        self._entry = entry

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self._entry.dtype]

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, place: Any) -> Tensor:
        """A part of the tensor; raises WeightsLost."""
        return self._tensors.read(self._entry)[place]


class TorchWeights:
    """Weights of the model in `folder`; the constructor waits for the weights process's answer.

    Models may share its memory until `close`.
    """

    def __init__(self, access: WeightsAccess, folder: Path) -> None:
        self._folder = folder
        self.shared = access.timeout_s > 0  # with other workers, by a weights process
        self._node = NodeCopy(access, folder)
        self._key: FormKey | None = None
        self._cleanup = ExitStack()
        self._linked = LinkedModel(self._node, folder)
        self._cleanup.callback(self._linked.close)

    def from_memory(self, dtype: Any) -> nn.Module | None:
        """The model as an earlier start has loaded it, or None; `dtype` as in `from_pretrained`."""
        identities = self._node.identities() if self._node.keep else []
        if self._node.store is None or not identities:
            return None
        try:
            module = _created(self._folder, dtype)
            if module is None:
                return None
            keys = [_key(module, dtype, identity) for identity in identities]
            self._key = keys[0]
            form = find_form(self._node.store, keys)
            if form is None:
                return None
            self._cleanup.callback(form.close)
            if distinct_tensors(module).keys() != {t.name for t in form.manifest.tensors}:
                module.tie_weights()
            if fill(module, form):
                log.info("the weights come from the memory of an earlier start")
                loaded: nn.Module = module
                return loaded
        except (WeightsError, OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            log.warning("the node's memory does not serve: %s", error)
        return None

    def arriving(self) -> dict[str, ArrivingTensor]:
        """The tensors of the copy by name, each to be read once it is there; empty without one."""
        copy = self._node.copy
        if copy is None:
            return {}
        tensors = ArrivingTensors(copy, self._folder)
        return {entry.name: ArrivingTensor(tensors, entry) for entry in tensors.entries}

    def give_up(self, error: WeightsLost) -> None:
        """Read the model's own folder from now on."""
        log.warning("all weights come from %s: %s", self._folder, error)
        self._node.close()
        self._key = None

    def folder(self) -> Path:
        """The folder to load from, once the copy is complete: with links to it, or the model's."""
        expected = self._node.copy
        folder = self._linked.folder()
        if expected is not None and folder == self._folder:
            self._key = None  # the files may be others than those that the key names
        return folder

    def keep(self, module: nn.Module) -> None:
        """Keep the weights of a loaded model for the next start."""
        if self._node.store is None or self._key is None:
            return
        form = keep_form(self._node.store, self._key, module)
        if form is not None:
            log.info("the weights are kept for the next start: %d bytes", form.manifest.size)
            form.close()

    def close(self) -> None:
        """End the use of the memory; that which a model still shares is freed with the model."""
        self._cleanup.close()


def plain_config(folder: Path) -> Any:
    """The configuration of a model; None if it is quantised: its tensors are then no parameters."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return None if getattr(config, "quantization_config", None) is not None else config


def _created(folder: Path, dtype: Any) -> Any:
    """The model without weights; None if it is quantised."""
    config = plain_config(folder)
    if config is None:
        return None
    if dtype == "auto":
        dtype = config.dtype or torch.float32
    with no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)


def _key(module: Any, dtype: Any, identity: str) -> FormKey:
    config = module.config.to_dict()
    config.pop("_name_or_path", None)
    facts = {
        "weights": identity,
        "versions": [torch.__version__, transformers_version],
        "config": config,
        "dtype": str(dtype),
    }
    return form_key(ENGINE, module, facts)
