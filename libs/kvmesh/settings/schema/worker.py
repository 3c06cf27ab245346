"""Settings of a worker with any engine."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import LOOPBACK, Count, MetricsHost, Port, Seconds, Section


class WorkerSettings(Section, frozen=True, kw_only=True):
    engine: Annotated[
        Literal["mock", "torch", "vllm", "openai", "sglang", "trtllm"],
        Meta(description="what runs the model"),
    ] = "mock"
    model: Annotated[
        Path | None, Meta(description="Hugging Face model folder; none: the built-in demo model")
    ] = None
    served_name: Annotated[str, Meta(description="model name in the API; empty: the folder's")] = ""
    revision: Annotated[
        str,
        Meta(description="revision of the weights; empty: that of a Hugging Face snapshot folder"),
    ] = ""
    tool_parser: Annotated[
        str, Meta(description="tool-call dialect of the model; empty: what its folder says")
    ] = ""
    reasoning_parser: Annotated[
        str, Meta(description="reasoning dialect of the model; empty: what its folder says")
    ] = ""
    name: Annotated[str, Meta(description="stable name over restarts; empty derives one")] = ""
    block_size: Annotated[Count, Meta(description="tokens per KV block")] = 16
    context: Annotated[
        int, Meta(ge=0, description="longest prompt plus output, in tokens; 0: the model's")
    ] = 0
    adapters: Annotated[list[str], Meta(description="LoRA adapters that it serves, by name")] = []
    labels: Annotated[
        list[str], Meta(description="key=value pairs on its card, which requests may ask for")
    ] = []
    serves: Annotated[
        Literal["aggregated", "prefill", "decode"],
        Meta(description="whole requests, or only prompts for others, or theirs and whole ones"),
    ] = "aggregated"
    load_interval_s: Annotated[Seconds, Meta(description="time between load messages")] = 0.1
    event_interval_s: Annotated[Seconds, Meta(description="KV events are gathered this long")] = (
        0.003
    )
    drain_timeout_s: Annotated[Seconds, Meta(description="longest wait for running requests")] = (
        60.0
    )
    max_waiting: Annotated[Count, Meta(description="requests queued in the engine before busy")] = (
        1024
    )
    hang_timeout_s: Annotated[
        Seconds, Meta(description="an engine with work that takes no step for this long is dead")
    ] = 60.0
    constraint_bytes: Annotated[
        Count, Meta(description="largest schema, grammar or expression that an answer may follow")
    ] = 512 << 10
    compile_timeout_s: Annotated[
        Seconds, Meta(description="longest time in which torch and vllm must compile one of these")
    ] = 10.0
    tenant_share: Annotated[
        float,
        Meta(gt=0, le=1, description="most of its blocks that one tenant may have kept longer"),
    ] = 0.5
    retention: Annotated[
        list[str],
        Meta(description="defaults per kind of token, as KIND=PRIORITY or KIND=PRIORITY/SECONDS"),
    ] = []
    session_idle_s: Annotated[
        Seconds, Meta(description="a session without a request for this long is forgotten")
    ] = 3600.0
    node: Annotated[
        str,
        Meta(description="the machine whose block manager it uses; empty: the host's name"),
    ] = ""
    shared_wait_s: Annotated[
        float,
        Meta(ge=0, description="longest wait for a prefix that another worker computes"),
    ] = 5.0
    write_through_blocks: Annotated[
        int,
        Meta(ge=0, description="most blocks that wait to be written to lower tiers; 0: none are"),
    ] = 4096
    metrics_port: Annotated[Port, Meta(description="port of /metrics and /health; 0: none")] = 0
    metrics_host: MetricsHost = LOOPBACK
