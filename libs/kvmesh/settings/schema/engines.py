"""Settings of single engines."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import Count, Seconds, Secret, Section, Url


class MockSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = (
        "watermark tick_s think_open think_close seed host_bytes_per_s disk_bytes_per_s "
        "transfer_bytes_per_s crash_step hang_step poison poison_effect slow_step slow_factor "
        "slow_prefill slow_decode noise noise_s calm_s heat heat_s lose_every"
    )
    task: Annotated[
        Literal["generate", "embed", "score"],
        Meta(description="generate text, embed texts, or score documents for a query"),
    ] = "generate"
    image_tokens: Annotated[
        int, Meta(ge=0, le=1 << 16, description="tokens of each image in a prompt; 0: reads none")
    ] = 0
    blocks: Annotated[Count, Meta(description="KV blocks of each rank of the mock engine")] = 16384
    max_sequences: Annotated[Count, Meta(description="sequences per step")] = 256
    max_batched_tokens: Annotated[Count, Meta(description="tokens per step")] = 8192
    watermark: Annotated[
        float, Meta(ge=0, lt=1, description="share of blocks that admission leaves free")
    ] = 0.01
    dp_ranks: Annotated[int, Meta(ge=1, le=64, description="data-parallel ranks")] = 1
    engines: Annotated[
        int, Meta(ge=1, le=4096, description="engines in one process, each a worker of its own")
    ] = 1
    speedup: Annotated[
        float, Meta(gt=0, description="factor by which it is faster than real time")
    ] = 1.0
    profile: Annotated[
        Path | None,
        Meta(description="step times: shipped name, NPZ or TOML; none: a polynomial"),
    ] = None
    prepare_s: Annotated[
        float, Meta(ge=0, description="duration of the part of the start that needs no device")
    ] = 0.0
    startup_s: Annotated[float, Meta(ge=0, description="duration of loading the model")] = 0.0
    tick_s: Annotated[
        float, Meta(ge=0, description="merge decode steps that fit into this time")
    ] = 0.0
    seed: Annotated[int, Meta(description="seed of the generated tokens")] = 0
    output_tokens: Annotated[
        Count,
        Meta(description="mean length of an output that ends by itself; varies by up to half"),
    ] = 512
    reasoning_tokens: Annotated[
        int, Meta(ge=0, description="reasoning tokens before each output; 0: none")
    ] = 0
    think_open: Annotated[str, Meta(description="text that opens reasoning")] = "<think>\n"
    think_close: Annotated[str, Meta(description="text that closes reasoning")] = "\n</think>\n\n"
    script: Annotated[
        Path | None, Meta(description="JSON lines of scripted outputs by session and turn")
    ] = None
    host_blocks: Annotated[
        int, Meta(ge=0, description="KV blocks of a host tier below each rank; 0: none")
    ] = 0
    disk_blocks: Annotated[
        int, Meta(ge=0, description="KV blocks of a disk tier below each rank; 0: none")
    ] = 0
    kvbm: Annotated[
        bool,
        Meta(description="keep stand-ins for KV blocks in the kvbm of the node, in modelled time"),
    ] = False
    kv_bytes_per_token: Annotated[Count, Meta(description="size of the KV of one token")] = 131072
    host_bytes_per_s: Annotated[
        float, Meta(gt=0, description="bandwidth between the engine and its host tier")
    ] = 25e9
    disk_bytes_per_s: Annotated[
        float, Meta(gt=0, description="bandwidth between the host and the disk tier")
    ] = 6e9
    transfer_bytes_per_s: Annotated[
        float, Meta(gt=0, description="bandwidth of KV transfers between workers")
    ] = 64e9
    crash_step: Annotated[
        int, Meta(ge=0, description="the engine crashes at this step; 0: never")
    ] = 0
    hang_step: Annotated[int, Meta(ge=0, description="this step never ends; 0: none")] = 0
    poison: Annotated[
        str, Meta(description="a prompt with this text triggers poison-effect; empty: none does")
    ] = ""
    poison_effect: Annotated[
        Literal["crash", "hang", "block"],
        Meta(description="the engine crashes, takes no more steps, or blocks the whole process"),
    ] = "crash"
    slow_step: Annotated[
        int, Meta(ge=0, description="steps are slow from this step on; 0: never")
    ] = 0
    slow_factor: Annotated[
        float, Meta(gt=0, description="factor by which slow steps are slower")
    ] = 10.0
    slow_prefill: Annotated[
        float, Meta(gt=0, description="factor by which computing prompts takes longer")
    ] = 1.0
    slow_decode: Annotated[
        float, Meta(gt=0, description="factor by which generating tokens takes longer")
    ] = 1.0
    noise: Annotated[
        float, Meta(gt=0, description="factor by which a noisy neighbour slows the engine; 1: none")
    ] = 1.0
    noise_s: Annotated[
        float, Meta(gt=0, description="mean duration of the neighbour's noisy spells")
    ] = 30.0
    calm_s: Annotated[
        float, Meta(gt=0, description="mean duration of the calm spells between them")
    ] = 60.0
    heat: Annotated[
        float,
        Meta(gt=0, description="factor by which heat slows an engine that is always busy; 1: none"),
    ] = 1.0
    heat_s: Annotated[
        float,
        Meta(gt=0, description="time in which an engine heats up or cools down by two thirds"),
    ] = 60.0
    lose_every: Annotated[
        int, Meta(ge=0, description="every n-th batch of KV events is lost; 0: none")
    ] = 0


class TorchSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = "watermark pass_tokens"
    device: Annotated[str, Meta(description="torch device; auto: a GPU if there is one")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(description="type of weights and KV; auto: float32 on the CPU, else the model's own"),
    ] = "auto"
    blocks: Annotated[int, Meta(ge=0, description="KV blocks; 0: as many as fit into kv-bytes")] = 0
    kv_bytes: Annotated[Count, Meta(description="memory for KV blocks, in bytes")] = 1 << 30
    max_sequences: Annotated[Count, Meta(description="sequences per step")] = 64
    max_batched_tokens: Annotated[Count, Meta(description="tokens per step")] = 512
    watermark: Annotated[
        float, Meta(ge=0, lt=1, description="share of blocks that admission leaves free")
    ] = 0.01
    pass_tokens: Annotated[
        int,
        Meta(
            ge=32,
            multiple_of=32,
            description="tokens of every forward pass, constant so that results are reproducible",
        ),
    ] = 32
    threads: Annotated[
        int, Meta(ge=0, description="CPU threads; 0: half of the cores, as a power of two")
    ] = 0


class RemoteSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = "probe_s"
    url: Annotated[Url, Meta(description="base URL of the running server of --engine openai")] = ""
    model: Annotated[
        str, Meta(description="model of that server; empty: the first in its list")
    ] = ""
    api_key: Annotated[Secret | None, Meta(description="API key of that server")] = None
    api: Annotated[
        Literal["auto", "completions", "generate"],
        Meta(description="/v1/completions with token ids, or SGLang's /generate"),
    ] = "auto"
    priority: Annotated[
        Literal["none", "lower", "higher"],
        Meta(description="which priorities the server schedules first, if any"),
    ] = "none"
    kv_events: Annotated[
        str, Meta(description="ZeroMQ endpoint of its KV events, of rank 0; empty: none")
    ] = ""
    kv_replay: Annotated[
        str, Meta(description="ZeroMQ endpoint that replays KV events; empty: none")
    ] = ""
    dp_ranks: Annotated[int, Meta(ge=1, le=64, description="data-parallel ranks")] = 1
    blocks: Annotated[
        Count, Meta(description="KV blocks of a rank, if the server does not report them")
    ] = 16384
    max_sequences: Annotated[
        Count, Meta(description="sequences per step, if the server does not report them")
    ] = 256
    max_batched_tokens: Annotated[Count, Meta(description="tokens per step")] = 8192
    kvbm: Annotated[
        bool, Meta(description="that server shares KV blocks through the kvbm of the node")
    ] = False
    probe_s: Annotated[Seconds, Meta(description="interval of health and load probes")] = 1.0


class VllmSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = "fork_servers"
    args: Annotated[
        list[str],
        Meta(description="engine arguments as KEY=VALUE; a dot in KEY reaches into a nested one"),
    ] = []
    args_file: Annotated[
        Path | None, Meta(description="TOML file of engine arguments, before those of args")
    ] = None
    adapters: Annotated[list[str], Meta(description="LoRA adapters, as NAME=FOLDER")] = []
    kvbm: Annotated[bool, Meta(description="share KV blocks through the kvbm of the node")] = False
    retention: Annotated[
        bool, Meta(description="retain blocks of the prefix cache as requests and pins ask")
    ] = True
    fork_servers: Annotated[
        bool,
        Meta(description="with a compile cache: import for vLLM's processes ahead, and fork them"),
    ] = True
    sleep_level: Annotated[
        int,
        Meta(
            ge=1,
            le=2,
            description="while the worker sleeps, 1: weights are in the memory of the host; 2: they"
            " are gone, and loaded again; needs enable_sleep_mode in args",
        ),
    ] = 1


class SglangSettings(Section, frozen=True, kw_only=True):
    args: Annotated[
        list[str],
        Meta(description="server arguments as KEY=VALUE; a dot in KEY reaches into a nested one"),
    ] = []
    args_file: Annotated[
        Path | None, Meta(description="TOML file of server arguments, before those of args")
    ] = None


class TrtllmSettings(Section, frozen=True, kw_only=True):
    args: Annotated[
        list[str],
        Meta(description="LLM arguments as KEY=VALUE; a dot in KEY reaches into a nested one"),
    ] = []
    args_file: Annotated[
        Path | None, Meta(description="TOML file of LLM arguments, before those of args")
    ] = None
