"""Settings of a worker with any engine."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import Count, Port, Seconds, Section


class WorkerSettings(Section, frozen=True, kw_only=True):
    TUNING: ClassVar = (
        "devices load_interval_s event_interval_s drain_blocks_s max_waiting "
        "compile_timeout_s tenant_share session_idle_s shared_wait_s write_through_blocks"
    )
    engine: Annotated[
        Literal["mock", "torch", "vllm", "openai", "sglang", "trtllm"],
        Meta(description="engine that runs the model"),
    ] = "mock"
    model: Annotated[
        Path | None,
        Meta(
            description="Hugging Face model folder, or NAME[@DIGEST] of a model in the mesh; none:"
            " the built-in demo model"
        ),
    ] = None
    served_name: Annotated[
        str, Meta(max_length=256, description="model name in the API; empty: the folder's")
    ] = ""
    revision: Annotated[
        str,
        Meta(description="revision of the weights; empty: that of a Hugging Face snapshot folder"),
    ] = ""
    tool_parser: Annotated[
        str, Meta(description="tool-call dialect of the model; empty: detected from its folder")
    ] = ""
    reasoning_parser: Annotated[
        str, Meta(description="reasoning dialect of the model; empty: detected from its folder")
    ] = ""
    name: Annotated[str, Meta(description="stable name across restarts; empty derives one")] = ""
    block_size: Annotated[Count, Meta(description="tokens per KV block")] = 16
    context: Annotated[
        int, Meta(ge=0, description="longest prompt plus output, in tokens; 0: the model's")
    ] = 0
    adapters: Annotated[list[str], Meta(description="LoRA adapters to serve, by name")] = []
    max_adapters: Annotated[
        int,
        Meta(
            ge=0,
            description="most LoRA adapters at once; 0: those of the settings only",
        ),
    ] = 0
    devices: Annotated[
        int,
        Meta(
            ge=0, description="devices of one rank, in which use counts; 0: as the engine reports"
        ),
    ] = 0
    labels: Annotated[
        list[str], Meta(description="key=value labels, which requests may select")
    ] = []
    serves: Annotated[
        Literal["aggregated", "prefill", "decode"],
        Meta(description="serve whole requests, only prompts, or prefilled and whole requests"),
    ] = "aggregated"
    parked: Annotated[
        bool,
        Meta(
            description="do all of the start that needs no device, then wait for a promotion, by"
            " the planner or `kvmesh fleet promote`"
        ),
    ] = False
    load_interval_s: Annotated[Seconds, Meta(description="time between load messages")] = 0.1
    event_interval_s: Annotated[
        Seconds,
        Meta(description="time between batches of KV events while requests run, unless many wait"),
    ] = 0.1
    drain_timeout_s: Annotated[Seconds, Meta(description="longest wait for running requests")] = (
        60.0
    )
    drain_blocks_s: Annotated[
        float,
        Meta(
            ge=0,
            description="longest time to store blocks in lower tiers before leaving; 0: no time",
        ),
    ] = 10.0
    max_waiting: Annotated[
        Count, Meta(description="requests queued in the engine before the worker is busy")
    ] = 1024
    hang_timeout_s: Annotated[
        Seconds, Meta(description="an engine with work but without a step for this long is dead")
    ] = 60.0
    compile_timeout_s: Annotated[
        Seconds, Meta(description="longest time for torch and vllm to compile a constraint")
    ] = 10.0
    tenant_share: Annotated[
        float,
        Meta(gt=0, le=1, description="largest share of its blocks retained for one tenant"),
    ] = 0.5
    retention: Annotated[
        list[str],
        Meta(
            description="default retention by kind of token, KIND=PRIORITY or KIND=PRIORITY/SECONDS"
        ),
    ] = []
    eviction: Annotated[
        Literal["forecast", "lru"],
        Meta(
            description="order of blocks without directives: by forecasts of their return or by use"
        ),
    ] = "forecast"
    session_idle_s: Annotated[
        Seconds, Meta(description="a session without a request for this long is forgotten")
    ] = 3600.0
    node: Annotated[
        str,
        Meta(description="machine whose kvbm it uses; empty: the host's name"),
    ] = ""
    shared_wait_s: Annotated[
        float,
        Meta(ge=0, description="longest wait for a prefix that another worker is computing"),
    ] = 5.0
    write_through_blocks: Annotated[
        int,
        Meta(
            ge=0,
            description="most blocks queued for write-through to lower tiers; 0: no write-through",
        ),
    ] = 4096
    metrics_port: Annotated[Port, Meta(description="port of /metrics and /health; 0: none")] = 0
