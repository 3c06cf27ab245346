"""The model loader behind `--load-format kvmesh`.

It takes a rank's weights from the node's memory as an earlier start left them, else tensor by
tensor from the copy of the checkpoint that the weights process fetches, else from the folder.
"""

import dataclasses
import logging
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

from kvmesh.weights.errors import WeightsLost
from kvmesh.worker.adapters.weights.arriving_tensors import ArrivingTensors
from kvmesh.worker.engines.vllm.start_phases import record
from kvmesh.worker.engines.vllm.weights.node_weights import NodeWeights
from kvmesh.worker.engines.vllm.weights.options import KEY, LOAD_FORMAT, LoaderOptions
from kvmesh.worker.engines.vllm.weights.server_weights import server_options, server_runs

log = logging.getLogger(__name__)


class KvmeshModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's loader of the folder, with the node's weights in front of it."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra = dict(load_config.model_loader_extra_config)
        given = extra.pop(KEY, None)
        self._options = None if given is None else msgspec.convert(given, LoaderOptions)
        self._config: VllmConfig | None = None
        self._weights: NodeWeights | None = None
        self._loaded_at = 0.0
        config = dataclasses.replace(
            load_config, load_format="auto", model_loader_extra_config=extra
        )
        super().__init__(config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Download what is no folder; a folder may lack weights, which then come from others."""
        if not Path(model_config.model).is_dir():
            super().download_model(model_config)

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        self._config = vllm_config
        options = self._options or server_options(vllm_config)
        if options is not None and Path(options.folder) == Path(model_config.model):
            self._weights = NodeWeights(options, model_config)
        model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        ended = time.time()
        record("post-processing", self._loaded_at, ended)
        log.info("the weights' processing took %.3f s", ended - self._loaded_at)
        server_runs()
        return model

    def create_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        if self._weights is not None:
            self._weights.untie_embeddings()
        model: nn.Module = super().create_model(vllm_config, model_config, prefix)
        return model

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        began = time.time()
        try:
            self._load(model, model_config)
        finally:
            self._loaded_at = time.time()
        record("weights", began, self._loaded_at)
        log.info("the weights took %.3f s", self._loaded_at - began)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        copy = self._weights.copy(model) if self._weights is not None else None
        if copy is None:
            yield from super().get_all_weights(model_config, model)
            return
        self.counter_before_loading_weights = time.perf_counter()
        tensors = ArrivingTensors(copy, Path(model_config.model))
        for entry in tensors.entries:
            if self._is_local(entry.name):
                yield entry.name, tensors.read(entry)

    def _load(self, model: nn.Module, model_config: ModelConfig) -> None:
        weights = self._weights
        if weights is None:
            super().load_weights(model, model_config)
            return
        if weights.take_form(self._config, model):
            return
        try:
            super().load_weights(model, model_config)
        except WeightsLost as error:
            weights.give_up(model, error)
            super().load_weights(model, model_config)
        weights.keep_form(model)
        weights.close()

    def _is_local(self, name: str) -> bool:
        """False for tensors of experts on other ranks."""
        return not should_skip_weight(name, self.local_expert_ids)


def register_load_format() -> None:
    """Let `--load-format` name this loader."""
    known: dict[str, Any] = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    if LOAD_FORMAT not in known:
        model_loader.register_model_loader(LOAD_FORMAT)(KvmeshModelLoader)
