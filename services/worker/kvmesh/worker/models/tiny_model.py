"""Writes a tiny model with random weights and the tokenizer of the demo; needs no torch."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvmesh.demo import model_dir

CONTEXT = 4096
VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS = 8192, 64, 176, 2
PADDING = 8182  # the token of which the embedding is zero
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32  # the smallest heads that every engine's attention supports
Weights: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
SPREAD = 0.2  # standard deviation of the weights
ALIGNMENT = 8  # of the tensors in a safetensors file
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": [8184, PADDING],
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": SPREAD,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": CONTEXT,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "pad_token_id": PADDING,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}


def make_tiny_model(folder: Path, seed: int = 0) -> None:
    """Write a Llama of 0.6 M random parameters (3 MB), the same bytes for the same seed.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    demo = model_dir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(demo / name, folder / name)
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n")
    (folder / "model.safetensors").write_bytes(_safetensors(_weights(seed)))


def _weights(seed: int) -> dict[str, Weights]:
    """The tensors by name: norms of ones, and else what torch draws for such a model.

    It draws all parameters twice, first while it makes the layers.
    """
    shapes = _shapes()
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    drawn = _normal(seed, sum(sizes.values()), sum(sizes.values()))
    ends = np.cumsum(list(sizes.values()))
    parts = dict(zip(sizes, np.split(drawn, ends[:-1]), strict=True))
    parts["model.embed_tokens.weight"].reshape(VOCABULARY, HIDDEN)[PADDING] = 0.0
    return {
        name: parts[name].reshape(shape) if name in parts else np.ones(shape, "<f4")
        for name, shape in shapes.items()
    }


def _normal(seed: int, skipped: int, count: int) -> Weights:
    """Normally distributed numbers, made of those of a Mersenne twister from `skipped` on.

    Sixteen at a time, by the method of Box and Muller; `count` is a multiple of that.
    """
    twister = np.random.RandomState(seed % (1 << 32))  # the same in all releases of numpy
    raw = twister.randint(0, 1 << 32, skipped + count, dtype=np.uint32)[skipped:]
    uniform = ((raw & 0xFFFFFF) / float(1 << 24)).reshape(-1, 2, 8)
    radius = np.sqrt(-2.0 * np.log(1.0 - uniform[:, 0]))
    angle = 2.0 * np.pi * uniform[:, 1]
    pairs = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
    return (pairs * SPREAD).reshape(-1).astype("<f4")


def _shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors by name; those of norms have one dimension."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    layers = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(LAYERS)
        for name, shape in layer.items()
    }
    ends = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    return {**ends, **layers}


def _safetensors(tensors: dict[str, Weights]) -> bytes:
    """A file with these tensors: the size of its header, the header, and their bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return b"".join(
        [len(text).to_bytes(8, "little"), text, *(tensor.tobytes() for tensor in tensors.values())]
    )
