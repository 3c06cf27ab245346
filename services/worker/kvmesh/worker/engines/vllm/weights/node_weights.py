"""The weights of one rank of vLLM in the memory of its node."""

import logging
from pathlib import Path
from typing import Any

from torch import nn

from kvmesh.weights.errors import WeightsError, WeightsLost
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.worker.adapters.weights.engine_form import (
    FormKey,
    fill,
    find_form,
    keep_form,
    note_of,
    structure,
)
from kvmesh.worker.adapters.weights.node_copy import NodeCopy
from kvmesh.worker.engines.vllm.weights.fingerprint import vllm_form_key
from kvmesh.worker.engines.vllm.weights.load_effects import LoadEffects, UnkeptChange, apply_changes
from kvmesh.worker.engines.vllm.weights.options import LoaderOptions

log = logging.getLogger(__name__)
LM_HEAD = "lm_head.weight"
_in_use: list[StoredCopy] = []  # forms whose memory the parameters of this process share


class NodeWeights:
    """Weights of the model in the folder; waits for the answer of the weights process."""

    def __init__(self, options: LoaderOptions, model_config: Any) -> None:
        self._folder = Path(options.folder)
        self._model_config = model_config
        self._node = NodeCopy(options.access, self._folder)
        self._key: FormKey | None = None
        self._effects: LoadEffects | None = None
        self._created: list[Any] = []

    def copy(self, model: nn.Module) -> StoredCopy | None:
        """The copy of the checkpoint; None: the weights come from the folder."""
        return None if _reads_other_files(model) else self._node.copy

    def untie_embeddings(self) -> None:
        """Let the copy decide on tied embeddings, as vLLM lets the files of a folder decide."""
        config = self._model_config.hf_config
        copy = self._node.copy
        if copy is None or not getattr(config, "tie_word_embeddings", False):
            return
        if any(tensor.name.endswith(LM_HEAD) for tensor in copy.manifest.tensors):
            config.tie_word_embeddings = False
            config.get_text_config().tie_word_embeddings = False
            self._model_config.word_embeddings_untied_by_checkpoint = True

    def take_form(self, config: Any, model: nn.Module) -> bool:
        """Give a created model the parameters that an earlier start has kept; False: load it."""
        node = self._node
        if node.store is None or not node.keep or _reads_other_files(model) or _loads_online(model):
            return False
        keys = [
            vllm_form_key(config, self._model_config, model, identity)
            for identity in node.identities()
        ]
        if not keys:
            return False
        self._key = keys[0]
        try:
            form = find_form(node.store, keys)
            if form is not None:
                _in_use.append(form)
                changes = note_of(form)
                if fill(model, form):
                    apply_changes(model, changes)
                    log.info("the weights come from the memory of an earlier start")
                    self.close()
                    return True
        except (WeightsError, ValueError, KeyError) as error:
            log.warning("the memory of an earlier start does not serve: %s", error)
        self._created, self._effects = structure(model), LoadEffects(model)
        return False

    def keep_form(self, model: nn.Module) -> None:
        """Keep the loaded parameters for the next start, if they are all that it needs."""
        store = self._node.store
        if store is None or self._key is None or self._effects is None:
            return
        try:
            changes = self._effects.changes(model)
            if structure(model) != self._created:
                raise UnkeptChange("its structure")
        except UnkeptChange as change:
            log.info("the weights are not kept: loading also changes %s", change)
            return
        form = keep_form(store, self._key, model, changes)
        if form is not None:
            log.info("the weights are kept for the next start: %d bytes", form.manifest.size)
            form.close()

    def give_up(self, model: nn.Module, error: WeightsLost) -> None:
        """Load everything from the folder instead; raises WeightsLost if that is too late."""
        if _loads_online(model):
            raise WeightsLost(f"{error}; this quantisation cannot begin again") from error
        log.warning("all weights come from %s: %s", self._folder, error)
        self.close()
        self._key = None

    def close(self) -> None:
        """End the use of the checkpoint's copy."""
        self._node.close()


def _reads_other_files(model: nn.Module) -> bool:
    """True if the model also reads files that no copy has."""
    return bool(
        getattr(model, "allow_patterns_overrides", None) or getattr(model, "secondary_weights", ())
    )


def _loads_online(model: nn.Module) -> bool:
    """True if layers are quantised while they are loaded: they cannot be loaded twice or kept."""
    return any(
        getattr(getattr(module, "quant_method", None), "uses_meta_device", False)
        for module in model.modules()
    )
