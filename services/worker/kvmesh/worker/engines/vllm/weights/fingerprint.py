"""Fingerprint of what determines the parameters of a rank of vLLM after loading."""

from typing import Any

import torch
from torch import nn
from vllm import __version__ as vllm_version
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.platforms import current_platform

from kvmesh.worker.adapters.weights.engine_form import FormKey, form_key

ENGINE = "vllm"
LAYOUT = (
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "data_parallel_size",
    "data_parallel_rank",
    "enable_expert_parallel",
    "enable_eplb",
    "eplb_config",
    "expert_placement_strategy",
)


def vllm_form_key(config: Any, model_config: Any, model: nn.Module, weights: str) -> FormKey:
    """The key of a created model in this process; `weights` names the checkpoint's content."""
    parallel = config.parallel_config
    pipeline = get_pp_group()
    tensor_rank, tensor_ranks = (
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
    )
    hf_config = model_config.hf_config.to_dict()
    hf_config.pop("_name_or_path", None)
    facts = {
        "weights": weights,
        "versions": [vllm_version, torch.__version__],
        "model": model_config.compute_hash(),
        "hf_config": hf_config,
        "dtype": str(model_config.dtype),
        "quantization": [model_config.quantization, str(model_config.quantization_config)],
        "cache_dtype": str(config.cache_config.cache_dtype),
        "lora": config.lora_config and config.lora_config.compute_hash(),
        "layout": {name: str(getattr(parallel, name, None)) for name in LAYOUT},
        "place": [pipeline.rank_in_group, tensor_rank],
        "load_device": config.load_config.device,
        "device": [config.device_config.device_type, current_platform.get_device_name()],
        "additional": str(config.additional_config),
    }
    rank = pipeline.rank_in_group * tensor_ranks + tensor_rank
    return form_key(ENGINE, model, facts, rank, pipeline.world_size * tensor_ranks)
