"""Step times of a GPU and model from published figures: the roofline model.

A step takes as long as its floating-point operations or its memory traffic, the longer one
(Williams, Waterman and Patterson 2009), each at a share of the published peak, and an overhead.
"""

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from kvmesh.step_times.profile import StepProfile

Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class that rejects unknown keys by name."""


class Accelerator(_Table, frozen=True, kw_only=True):
    """Published figures of one GPU; `count` of them serve the model with tensor parallelism.

    `flops` are dense operations per second at the precision of the weights, `attention_flops` those
    at the precision of attention.
    """

    name: str
    count: Count = 1
    memory_bytes: Positive
    bytes_per_s: Positive
    flops: Positive
    attention_flops: Positive


class TransformerSize(_Table, frozen=True, kw_only=True):
    """Published sizes of a dense transformer; bytes are those of a weight and of a KV element."""

    name: str
    parameters: Positive
    layers: Count
    heads: Count
    kv_heads: Count
    head_size: Count
    weight_bytes: Positive
    kv_element_bytes: Positive = 2.0


class Assumptions(_Table, frozen=True, kw_only=True):
    """The part that is not published: shares of the peaks, overheads, and limits of the engine.

    `step_overhead_ms` is the time of a step besides its kernels, `reduce_us` that of one all-reduce
    between several GPUs, of which each layer has two. `free_bytes` of each GPU hold neither weights
    nor KV.
    """

    compute_share: Share
    bandwidth_share: Share
    step_overhead_ms: Annotated[float, Meta(ge=0)]
    reduce_us: Annotated[float, Meta(ge=0)] = 0.0
    free_bytes: Positive
    max_batched_tokens: Count
    max_sequences: Count


class PublishedSource(_Table, frozen=True, kw_only=True):
    """A publication and the figures that come from it."""

    title: str
    url: str
    figures: str


class ComparedFigure(_Table, frozen=True, kw_only=True):
    """A published measurement of a decode or a prefill step, to compare the roofline with.

    `tokens` are those of the prompts if `sequences` is 0, else the KV tokens of all sequences.
    """

    measured_ms: Positive
    tokens: Count
    sequences: Annotated[int, Meta(ge=0)] = 0
    note: str
    url: str


class Roofline(_Table, frozen=True, kw_only=True):
    """A GPU and a model; the file says what is published and what is assumed."""

    description: str
    accelerator: Accelerator
    model: TransformerSize
    assumed: Assumptions
    sources: Annotated[list[PublishedSource], Meta(min_length=1)]
    compared: list[ComparedFigure] = []

    @property
    def kv_bytes_per_token(self) -> int:
        model = self.model
        per_layer = 2 * model.kv_heads * model.head_size * model.kv_element_bytes
        return int(model.layers * per_layer)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights; below 1 if the weights do not fit."""
        gpu = self.accelerator
        room = gpu.count * (gpu.memory_bytes - self.assumed.free_bytes) - self._weight_bytes
        return int(room / self.kv_bytes_per_token)

    def prefill_s(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds to compute one prompt of `tokens`."""
        model, gpu, assumed = self.model, self.accelerator, self.assumed
        peak = gpu.count * assumed.compute_share
        dense = 2 * model.parameters * tokens / (gpu.flops * peak)
        # two products of t²/2 pairs, each of 2 operations per element of a head
        pairs = 2 * model.layers * model.heads * model.head_size * tokens**2
        compute = dense + pairs / (gpu.attention_flops * peak)
        return np.maximum(compute, self._read_s(self._weight_bytes)) + self._overhead_s

    def decode_s(
        self, sequences: NDArray[np.float64], tokens: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Seconds of a step that decodes `sequences` with `tokens` of KV in all."""
        gpu = self.accelerator
        flops = gpu.count * gpu.flops * self.assumed.compute_share
        compute = 2 * self.model.parameters * sequences / flops
        memory = self._read_s(self._weight_bytes + tokens * self.kv_bytes_per_token)
        return np.maximum(compute, memory) + self._overhead_s

    def profile(self) -> StepProfile:
        """The times as a profile; raises ValueError if the weights leave no room for KV."""
        room, assumed = self.kv_tokens, self.assumed
        if room < assumed.max_batched_tokens:
            raise ValueError(f"the GPUs hold the weights and {max(room, 0)} tokens of KV")
        prompts = np.unique(np.geomspace(1, 4 * assumed.max_batched_tokens, 40).round())
        active = np.array([1.0, *np.linspace(0, room, 33)[1:].round()])
        contexts = np.geomspace(64, 262_144, 13).round()
        sequences = active[:, None] / contexts
        return StepProfile(
            {
                "prefill_isl": prompts,
                "prefill_ttft_ms": 1000 * self.prefill_s(prompts),
                "decode_active_kv_tokens": active,
                "decode_context_length": contexts,
                "decode_itl": 1000 * self.decode_s(sequences, active[:, None]),
                "max_batched_tokens": np.array(float(assumed.max_batched_tokens)),
                "max_sequences": np.array(float(assumed.max_sequences)),
                "kv_tokens": np.array(float(room)),
                "kv_bytes_per_token": np.array(float(self.kv_bytes_per_token)),
            }
        )

    @property
    def _weight_bytes(self) -> float:
        return self.model.parameters * self.model.weight_bytes

    @property
    def _overhead_s(self) -> float:
        assumed, several = self.assumed, self.accelerator.count > 1
        reduces = 2 * self.model.layers * assumed.reduce_us / 1e6 if several else 0.0
        return assumed.step_overhead_ms / 1000 + reduces

    def _read_s(self, size: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
        gpu = self.accelerator
        return size / (gpu.count * gpu.bytes_per_s * self.assumed.bandwidth_share)


def read_roofline(text: bytes) -> Roofline:
    """The roofline of a TOML document; raises msgspec.MsgspecError or UnicodeDecodeError."""
    return msgspec.toml.decode(text, type=Roofline)
