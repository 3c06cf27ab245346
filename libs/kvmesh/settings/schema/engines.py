"""Settings of single engines."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import (
    Amount,
    Count,
    Positive,
    Seconds,
    Secret,
    Section,
    Url,
    Weight,
)


class MockSettings(Section, frozen=True, kw_only=True):
    """
    task: generate text, embed texts, or score documents for a query
    image_tokens: tokens of each image in a prompt; 0: reads none
    blocks: KV blocks of each rank of the mock engine
    max_sequences: sequences per step
    max_batched_tokens: tokens per step
    dp_ranks: data-parallel ranks
    engines: engines in one process, each a worker of its own
    speedup: factor by which it is faster than real time
    profile: step times: shipped name, NPZ or TOML; none: a polynomial
    prepare_s: duration of the part of the start that needs no device
    startup_s: duration of loading the model
    output_tokens: mean length of an output that ends by itself; varies by up to half
    reasoning_tokens: reasoning tokens before each output; 0: none
    script: JSON lines of scripted outputs by session and turn
    host_blocks: KV blocks of a host tier below each rank; 0: none
    disk_blocks: KV blocks of a disk tier below each rank; 0: none
    kvbm: keep stand-ins for KV blocks in the kvbm of the node, in modelled time
    kv_bytes_per_token: size of the KV of one token

    Tuning:
    watermark: share of blocks that admission leaves free
    tick_s: merge decode steps that fit into this time
    seed: seed of the generated tokens
    think_open: text that opens reasoning
    think_close: text that closes reasoning
    host_bytes_per_s: bandwidth between the engine and its host tier
    disk_bytes_per_s: bandwidth between the host and the disk tier
    transfer_bytes_per_s: bandwidth of KV transfers between workers
    crash_step: the engine crashes at this step; 0: never
    hang_step: this step never ends; 0: none
    poison: a prompt with this text triggers poison-effect; empty: none does
    poison_effect: the engine crashes, takes no more steps, or blocks the whole process
    slow_step: steps are slow from this step on; 0: never
    slow_factor: factor by which slow steps are slower
    slow_prefill: factor by which computing prompts takes longer
    slow_decode: factor by which generating tokens takes longer
    noise: factor by which a noisy neighbour slows the engine; 1: none
    noise_s: mean duration of the neighbour's noisy spells
    calm_s: mean duration of the calm spells between them
    heat: factor by which heat slows an engine that is always busy; 1: none
    heat_s: time in which an engine heats up or cools down by two thirds
    lose_every: every n-th batch of KV events is lost; 0: none
    """

    task: Literal["generate", "embed", "score"] = "generate"
    image_tokens: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    blocks: Count = 16384
    max_sequences: Count = 256
    max_batched_tokens: Count = 8192
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    dp_ranks: Annotated[int, Meta(ge=1, le=64)] = 1
    engines: Annotated[int, Meta(ge=1, le=4096)] = 1
    speedup: Positive = 1.0
    profile: Path | None = None
    prepare_s: Weight = 0.0
    startup_s: Weight = 0.0
    tick_s: Weight = 0.0
    seed: int = 0
    output_tokens: Count = 512
    reasoning_tokens: Amount = 0
    think_open: str = "<think>\n"
    think_close: str = "\n</think>\n\n"
    script: Path | None = None
    host_blocks: Amount = 0
    disk_blocks: Amount = 0
    kvbm: bool = False
    kv_bytes_per_token: Count = 131072
    host_bytes_per_s: Positive = 25e9
    disk_bytes_per_s: Positive = 6e9
    transfer_bytes_per_s: Positive = 64e9
    crash_step: Amount = 0
    hang_step: Amount = 0
    poison: str = ""
    poison_effect: Literal["crash", "hang", "block"] = "crash"
    slow_step: Amount = 0
    slow_factor: Positive = 10.0
    slow_prefill: Positive = 1.0
    slow_decode: Positive = 1.0
    noise: Positive = 1.0
    noise_s: Positive = 30.0
    calm_s: Positive = 60.0
    heat: Positive = 1.0
    heat_s: Positive = 60.0
    lose_every: Amount = 0


class TorchSettings(Section, frozen=True, kw_only=True):
    """
    device: torch device; auto: a GPU if there is one
    dtype: type of weights and KV; auto: float32 on the CPU, else the model's own
    blocks: KV blocks; 0: as many as fit into kv-bytes
    kv_bytes: memory for KV blocks, in bytes
    max_sequences: sequences per step
    max_batched_tokens: tokens per step
    threads: CPU threads; 0: half of the cores, as a power of two

    Tuning:
    watermark: share of blocks that admission leaves free
    pass_tokens: tokens of every forward pass, constant so that results are reproducible
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    blocks: Amount = 0
    kv_bytes: Count = 1 << 30
    max_sequences: Count = 64
    max_batched_tokens: Count = 512
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    pass_tokens: Annotated[int, Meta(ge=32, multiple_of=32)] = 32
    threads: Amount = 0


class RemoteSettings(Section, frozen=True, kw_only=True):
    """
    url: base URL of the running server of --engine openai
    model: model of that server; empty: the first in its list
    api_key: API key of that server
    api: /v1/completions with token ids, or SGLang's /generate
    priority: which priorities the server schedules first, if any
    kv_events: ZeroMQ endpoint of its KV events, of rank 0; empty: none
    kv_replay: ZeroMQ endpoint that replays KV events; empty: none
    dp_ranks: data-parallel ranks
    blocks: KV blocks of a rank, if the server does not report them
    max_sequences: sequences per step, if the server does not report them
    max_batched_tokens: tokens per step
    kvbm: that server shares KV blocks through the kvbm of the node

    Tuning:
    probe_s: interval of health and load probes
    """

    url: Url = ""
    model: str = ""
    api_key: Secret | None = None
    api: Literal["auto", "completions", "generate"] = "auto"
    priority: Literal["none", "lower", "higher"] = "none"
    kv_events: str = ""
    kv_replay: str = ""
    dp_ranks: Annotated[int, Meta(ge=1, le=64)] = 1
    blocks: Count = 16384
    max_sequences: Count = 256
    max_batched_tokens: Count = 8192
    kvbm: bool = False
    probe_s: Seconds = 1.0


class VllmSettings(Section, frozen=True, kw_only=True):
    """
    args: engine arguments as KEY=VALUE; a dot in KEY reaches into a nested one
    args_file: TOML file of engine arguments, before those of args
    adapters: LoRA adapters, as NAME=FOLDER
    kvbm: share KV blocks through the kvbm of the node
    retention: retain blocks of the prefix cache as requests and pins ask
    sleep_level: weights of a sleeping worker, with enable_sleep_mode in args; 1: in host memory, 2:
        loaded again

    Tuning:
    fork_servers: with a compile cache: import for vLLM's processes ahead, and fork them
    """

    args: list[str] = []
    args_file: Path | None = None
    adapters: list[str] = []
    kvbm: bool = False
    retention: bool = True
    fork_servers: bool = True
    sleep_level: Annotated[int, Meta(ge=1, le=2)] = 1


class SglangSettings(Section, frozen=True, kw_only=True):
    """
    args: server arguments as KEY=VALUE; a dot in KEY reaches into a nested one
    args_file: TOML file of server arguments, before those of args
    """

    args: list[str] = []
    args_file: Path | None = None


class TrtllmSettings(Section, frozen=True, kw_only=True):
    """
    args: LLM arguments as KEY=VALUE; a dot in KEY reaches into a nested one
    args_file: TOML file of LLM arguments, before those of args
    """

    args: list[str] = []
    args_file: Path | None = None
