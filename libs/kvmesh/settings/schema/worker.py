"""Settings of a worker with any engine."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from kvmesh.settings.schema.common import Amount, Count, Port, Seconds, Section, Weight


class WorkerSettings(Section, frozen=True, kw_only=True):
    """
    engine: engine that runs the model
    model: Hugging Face model folder, or NAME[@DIGEST] of a model in the mesh; none: the built-in
        demo model
    served_name: model name in the API; empty: the folder's
    revision: revision of the weights; empty: that of a Hugging Face snapshot folder
    tool_parser: tool-call dialect of the model; empty: detected from its folder
    reasoning_parser: reasoning dialect of the model; empty: detected from its folder
    name: stable name across restarts; empty derives one
    block_size: tokens per KV block
    context: longest prompt plus output, in tokens; 0: the model's
    adapters: LoRA adapters to serve, by name
    max_adapters: most LoRA adapters at once; 0: those of the settings only
    labels: key=value labels, which requests may select
    serves: serve whole requests, only prompts, or prefilled and whole requests
    parked: do all of the start that needs no device, then wait for a promotion, by the planner or
        `kvmesh fleet promote`
    drain_timeout_s: longest wait for running requests
    hang_timeout_s: an engine with work but without a step for this long is dead
    retention: default retention by kind of token, KIND=PRIORITY or KIND=PRIORITY/SECONDS
    node: machine whose kvbm it uses; empty: the host's name
    metrics_port: port of /metrics and /health; 0: none

    Tuning:
    devices: devices of one rank, in which use counts; 0: as the engine reports
    load_interval_s: time between load messages
    event_interval_s: time between batches of KV events while requests run, unless many wait
    drain_blocks_s: longest time to store blocks in lower tiers before leaving; 0: no time
    max_waiting: requests queued in the engine before the worker is busy
    compile_timeout_s: longest time for torch and vllm to compile a constraint
    tenant_share: largest share of its blocks retained for one tenant
    session_idle_s: a session without a request for this long is forgotten
    shared_wait_s: longest wait for a prefix that another worker is computing
    write_through_blocks: most blocks queued for write-through to lower tiers; 0: no write-through
    """

    engine: Literal["mock", "torch", "vllm", "openai", "sglang", "trtllm"] = "mock"
    model: Path | None = None
    served_name: Annotated[str, Meta(max_length=256)] = ""
    revision: str = ""
    tool_parser: str = ""
    reasoning_parser: str = ""
    name: str = ""
    block_size: Count = 16
    context: Amount = 0
    adapters: list[str] = []
    max_adapters: Amount = 0
    devices: Amount = 0
    labels: list[str] = []
    serves: Literal["aggregated", "prefill", "decode"] = "aggregated"
    parked: bool = False
    load_interval_s: Seconds = 0.1
    event_interval_s: Seconds = 0.1
    drain_timeout_s: Seconds = 60.0
    drain_blocks_s: Weight = 10.0
    max_waiting: Count = 1024
    hang_timeout_s: Seconds = 60.0
    compile_timeout_s: Seconds = 10.0
    tenant_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    retention: list[str] = []
    session_idle_s: Seconds = 3600.0
    node: str = ""
    shared_wait_s: Weight = 5.0
    write_through_blocks: Amount = 4096
    metrics_port: Port = 0
