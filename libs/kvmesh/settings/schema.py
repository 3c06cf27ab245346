"""Every option of every service: its type, bounds, default and meaning, stated once.

Each one is a key of the TOML file (`[router] policy = "kv"`), an environment variable
(`KVMESH_ROUTER_POLICY`) and a command-line flag (`kvmesh router --policy kv`).
"""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Weight = Annotated[float, Meta(ge=0)]
LOOPBACK = "127.0.0.1"
MetricsHost = Annotated[
    str, Meta(description="address of metrics-port, which asks nobody for a key")
]
# never shown, no flag's value; also read from a file: password_file, KVMESH_NATS_PASSWORD_FILE …
Secret = Annotated[str, Meta(extra={"secret": True})]
Url = Annotated[str, Meta(extra={"url": True})]  # shown without the user and password in it


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: an unknown key is an error that names it."""


class NatsSettings(Section, frozen=True, kw_only=True):
    url: Annotated[
        Url, Meta(description="NATS servers, separated by commas; empty starts one within `up`")
    ] = ""
    namespace: Annotated[
        str, Meta(pattern="^[A-Za-z0-9_-]+$", description="name of this mesh on the bus")
    ] = "kvmesh"
    user: Annotated[str | None, Meta(description="user name")] = None
    password: Annotated[Secret | None, Meta(description="password")] = None
    token: Annotated[Secret | None, Meta(description="authentication token")] = None
    credentials: Annotated[str | None, Meta(description="path of a .creds file")] = None
    nkey_seed: Annotated[
        Secret | None, Meta(description="seed of the nkey that says who this process is")
    ] = None
    tls_ca: Annotated[
        Path | None,
        Meta(description="PEM file of the authority that the servers' certificates come from"),
    ] = None
    tls_cert: Annotated[
        Path | None, Meta(description="PEM file of this process's certificate, for mutual TLS")
    ] = None
    tls_key: Annotated[Path | None, Meta(description="PEM file of that certificate's key")] = None
    inbox_prefix: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=-]+)*$",
            description="first part of the subjects on which this process gets answers",
        ),
    ] = "_INBOX"
    replicas: Annotated[int, Meta(ge=1, le=5, description="copies of each stream")] = 1


class StreamSettings(Section, frozen=True, kw_only=True):
    kv_bytes: Annotated[int, Meta(ge=1 << 20, description="most bytes of KV events kept")] = 4 << 30
    kv_age_s: Annotated[Seconds, Meta(description="longest that a KV event is kept")] = 86400.0
    route_bytes: Annotated[int, Meta(ge=1 << 20, description="most bytes of decisions kept")] = (
        2 << 30
    )
    route_age_s: Annotated[Seconds, Meta(description="longest that a decision is kept")] = 86400.0
    seq_bytes: Annotated[
        int, Meta(ge=1 << 20, description="most bytes of active-sequence messages kept")
    ] = 64 << 20
    seq_age_s: Annotated[
        Seconds, Meta(description="longest that an active-sequence message is kept")
    ] = 3600.0
    lease_s: Annotated[
        float,
        Meta(
            ge=1,
            description="a process that does not renew for this long is gone; where processes"
            " differ, what the first was set to holds for all, until NATS starts again",
        ),
    ] = 10.0


class LogSettings(Section, frozen=True, kw_only=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severity shown")
    ] = "info"
    format: Annotated[Literal["text", "json"], Meta(description="form of a log line")] = "text"


class ProcessSettings(Section, frozen=True, kw_only=True):
    hang_timeout_s: Annotated[
        Seconds, Meta(description="a service whose event loop does not turn for this long ends")
    ] = 30.0


class FrontendSettings(Section, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port to listen on; 0 picks a free one")] = 8000
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    processes: Annotated[
        int, Meta(ge=1, le=256, description="frontend processes that share the port")
    ] = 1
    reuse_port: Annotated[bool, Meta(description="let other processes listen on the same port")] = (
        False
    )
    metrics_port: Annotated[
        Port, Meta(description="port of this process's own /metrics and /health; 0: none")
    ] = 0
    metrics_host: MetricsHost = LOOPBACK
    keys_file: Annotated[
        Path | None, Meta(description="TOML file of API keys; none: no key is asked for")
    ] = None
    keys_bucket: Annotated[bool, Meta(description="take API keys from the mesh's bucket")] = False
    allow_anonymous: Annotated[
        bool, Meta(description="listen beyond loopback without API keys")
    ] = False
    tenant_secret: Annotated[
        Secret | None,
        Meta(
            description="64 hexadecimal digits under which tenants are told apart; none: the mesh's"
        ),
    ] = None
    max_body_bytes: Annotated[Count, Meta(description="largest request body")] = 8 << 20
    max_in_flight: Annotated[
        Count, Meta(description="requests served at once; more are told to wait")
    ] = 4096
    route_timeout_s: Annotated[Seconds, Meta(description="longest wait for a placement")] = 60.0
    restart_wait_s: Annotated[
        Seconds, Meta(description="longest wait for a router or worker where none is running")
    ] = 5.0
    prefill_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for a prefill worker, before doing without")
    ] = 60.0
    stall_timeout_s: Annotated[
        Seconds, Meta(description="longest silence of a live worker before a request fails")
    ] = 120.0
    keepalive_s: Annotated[
        Seconds, Meta(description="a stream silent for this long gets a keep-alive comment")
    ] = 10.0
    frame_interval_s: Annotated[
        float, Meta(ge=0, le=1, description="tokens of one stream ready within this share a frame")
    ] = 0.005
    prepare_cache_bytes: Annotated[
        int, Meta(ge=0, description="memory for tokens of conversations seen before")
    ] = 48 << 20
    session_prompts_bytes: Annotated[
        int, Meta(ge=0, description="memory for the last prompt of each session, to prefetch it")
    ] = 32 << 20
    speculative_tokens: Annotated[
        int, Meta(ge=0, description="most tokens computed ahead of a turn that asks for it")
    ] = 8192
    responses_ttl_s: Annotated[
        Seconds, Meta(description="how long a stored response can be continued or read")
    ] = 86400.0
    responses_bytes: Annotated[
        int, Meta(ge=1 << 20, description="most bytes of stored responses; the oldest go first")
    ] = 1 << 30
    responses_tenant_share: Annotated[
        float, Meta(gt=0, le=1, description="share of these that one tenant has at most")
    ] = 0.25
    body_timeout_s: Annotated[
        Seconds, Meta(description="longest time for a request body to arrive")
    ] = 30.0
    idle_timeout_s: Annotated[
        Seconds, Meta(description="a connection without a request is closed after this long")
    ] = 75.0
    slow_reader_s: Annotated[
        Seconds, Meta(description="a client that reads nothing for this long is cut")
    ] = 30.0
    linger_s: Annotated[
        float,
        Meta(ge=0, description="serve on for this long when told to stop, with /health at 503"),
    ] = 0.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for running answers when told to stop")
    ] = 60.0
    migration_limit: Annotated[
        int, Meta(ge=0, description="how often a request may move to another worker")
    ] = 3


class RouterSettings(Section, frozen=True, kw_only=True):
    policy: Annotated[
        str, Meta(description="how to choose a worker: a built-in policy, or module:Class")
    ] = "kv"
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    overlap_credits: Annotated[
        list[float],
        Meta(min_length=4, max_length=4, description="worth of an overlapping block, per tier"),
    ] = field(default_factory=lambda: [1.0, 0.75, 0.25, 0.25])
    prefill_weight: Annotated[Weight, Meta(description="cost of a block to prefill")] = 3.0
    request_weight: Annotated[Weight, Meta(description="cost of an active request, in blocks")] = (
        0.0
    )
    credit_decay: Annotated[
        Weight, Meta(description="how fast credits fade where more prefill waits than elsewhere")
    ] = 0.0
    temperature: Annotated[Weight, Meta(description="0 takes the cheapest; above, softmax")] = 0.0
    seed: Annotated[int | None, Meta(description="seed of ties and sampling; none is random")] = (
        None
    )
    index_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for the index before routing without it")
    ] = 0.25
    sequence_ttl_s: Annotated[
        Seconds, Meta(description="an active sequence without any news for this long is lost")
    ] = 300.0
    kv_events: Annotated[
        bool, Meta(description="ask the index; if not, assume prompts stay where they were sent")
    ] = True
    predicted_ttl_s: Annotated[
        Weight, Meta(description="a placed prompt counts as cached for this long; 0: not at all")
    ] = 5.0
    approximate_ttl_s: Annotated[Seconds, Meta(description="the same where kv_events is off")] = (
        120.0
    )
    busy_blocks: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="active blocks at which a rank takes no more"),
    ] = None
    busy_blocks_share: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="the same as a share of the rank's blocks"),
    ] = None
    busy_prefill_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="prefill tokens at which a rank takes no more"),
    ] = None
    queue_threshold: Annotated[
        Weight,
        Meta(
            description="requests wait here while every rank has more than this many engine steps "
            "of prefill; 0: never"
        ),
    ] = 2.0
    queue_order: Annotated[
        Literal["fcfs", "wspt", "lcfs"], Meta(description="order of waiting requests of one tier")
    ] = "fcfs"
    queue_limit: Annotated[Count, Meta(description="waiting requests; more are refused")] = 4096
    queue_quantum: Annotated[
        Count, Meta(description="uncached tokens that a fair class may send per turn")
    ] = 8192
    fair_weights: Annotated[
        list[str], Meta(description="quanta per turn of a class or tenant, as NAME=WEIGHT")
    ] = []
    priority_shift_s: Annotated[
        Weight, Meta(description="a request of priority p counts as come p times this earlier")
    ] = 1.0
    latency_shift_s: Annotated[
        Weight, Meta(description="a fully latency-sensitive request counts as come this earlier")
    ] = 10.0
    starvation_s: Annotated[
        Seconds, Meta(description="a request that waited for this long goes before all others")
    ] = 30.0
    rescore_s: Annotated[
        Seconds, Meta(description="overlaps of a waiting request older than this are asked anew")
    ] = 5.0
    load_beta: Annotated[
        Weight, Meta(description="load-aware: weight of relative load against the cached share")
    ] = 1.0
    session_mode: Annotated[
        Literal["hard", "soft"], Meta(description="session: stay always, or while it pays")
    ] = "soft"
    session_ttl_s: Annotated[Seconds, Meta(description="session: an idle binding ends")] = 300.0
    session_spill: Annotated[
        Weight, Meta(description="session, soft: leave for a rank cheaper by this share of prompt")
    ] = 0.5
    disagg_tokens: Annotated[
        int, Meta(ge=0, description="uncached tokens from which a prefill worker takes the prompt")
    ] = 2048
    disagg_backlog: Annotated[
        Weight, Meta(description="a prefill rank with more steps of prefill than this is left out")
    ] = 4.0
    prefill_credits: Annotated[
        list[float], Meta(min_length=4, max_length=4, description="overlap_credits when prefilling")
    ] = field(default_factory=lambda: [1.0, 0.75, 0.25, 0.25])
    decode_credits: Annotated[
        list[float],
        Meta(min_length=4, max_length=4, description="overlap_credits when only decoding"),
    ] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])
    thompson_exploration: Annotated[
        Weight, Meta(description="thompson: scale of the sampled uncertainty")
    ] = 0.25
    thompson_forgetting: Annotated[
        float, Meta(gt=0, le=1, description="thompson: what old evidence is worth per new one")
    ] = 0.995
    thompson_feedback_s: Annotated[
        Seconds, Meta(description="thompson: a first token later than this counts as this late")
    ] = 120.0
    thompson_trust: Annotated[
        Count, Meta(description="thompson: outcomes before it departs from kv")
    ] = 50
    program_tick_s: Annotated[Seconds, Meta(description="program: time between reviews")] = 5.0
    program_pause: Annotated[
        float, Meta(gt=0, le=1, description="program: share of blocks past which agents pause")
    ] = 0.95
    program_pause_target: Annotated[
        float, Meta(gt=0, le=1, description="program: share of blocks that pausing reaches")
    ] = 0.80
    program_demote: Annotated[
        float, Meta(gt=0, le=1, description="program: share of blocks past which agents yield")
    ] = 0.80
    program_hysteresis: Annotated[
        float, Meta(ge=0, lt=1, description="program: room below program_pause left by resuming")
    ] = 0.10
    program_resume_s: Annotated[
        Seconds, Meta(description="program: longest pause of an agent that wants to go on")
    ] = 1800.0
    program_demote_s: Annotated[
        Weight, Meta(description="program: a yielding agent counts as come this much later")
    ] = 2.0
    program_boost_s: Annotated[
        Weight, Meta(description="program: a resumed agent counts as come this much earlier")
    ] = 1.0
    program_acting_weight: Annotated[
        float, Meta(ge=0, le=1, description="program: weight of an agent's tokens as a tool starts")
    ] = 1.0
    program_acting_tau_s: Annotated[
        Seconds, Meta(description="program: time constant in which that weight decays")
    ] = 1.0
    metrics_port: Annotated[Port, Meta(description="port of /metrics and /health; 0: none")] = 0
    metrics_host: MetricsHost = LOOPBACK


class IndexerSettings(Section, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    shards: Annotated[Count, Meta(description="parts that the index is divided into")] = 1
    shard: Annotated[int, Meta(ge=0, description="which of them this replica holds, from 0")] = 0
    shard_by: Annotated[
        Literal["namespace", "root"],
        Meta(description="divide by model, adapter and tenant, or by the first block of a prompt"),
    ] = "namespace"
    snapshot_threshold: Annotated[
        Count, Meta(description="a snapshot is due after this many messages of the KV stream")
    ] = 1_000_000
    snapshot_bytes: Annotated[
        Count, Meta(description="… or this many bytes of them (a quarter of the stream at most)")
    ] = 1 << 30
    snapshot_age_s: Annotated[
        Seconds,
        Meta(description="… or when the newest is this old (a quarter of kv_age_s at most)"),
    ] = 3600.0
    reset_states: Annotated[
        bool, Meta(description="purge the KV stream and the snapshots, and start empty")
    ] = False
    lag_limit_s: Annotated[
        Seconds, Meta(description="a replica that is further behind the stream stops answering")
    ] = 2.0
    shard_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for the answer of another shard")
    ] = 0.2
    metrics_port: Annotated[Port, Meta(description="port of /metrics and /health; 0: none")] = 0
    metrics_host: MetricsHost = LOOPBACK


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


class KvbmSettings(Section, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="stable name; empty derives one")] = ""
    node: Annotated[
        str, Meta(description="the machine that its workers are on, too; empty: the host's name")
    ] = ""
    directory: Annotated[
        Path | None,
        Meta(description="folder in memory shared with the workers; none: one under /dev/shm"),
    ] = None
    host_bytes: Annotated[int, Meta(ge=1 << 20, description="memory for blocks, in bytes")] = (
        1 << 30
    )
    disk_path: Annotated[
        Path | None, Meta(description="folder on a local disk for blocks; none: no disk is used")
    ] = None
    disk_bytes: Annotated[int, Meta(ge=1 << 20, description="most bytes of blocks on disk")] = (
        16 << 30
    )
    disk_free_bytes: Annotated[
        int, Meta(ge=0, description="bytes of that disk which blocks leave free")
    ] = 1 << 30
    disk_frequency: Annotated[
        Weight, Meta(description="blocks asked for this often go to disk; a hit doubles it; 1: all")
    ] = 2.0
    disk_threads: Annotated[Count, Meta(description="reads and writes of the disk at once")] = 4
    remote_url: Annotated[
        Url,
        Meta(description="store of all nodes: redis://, rediss://, unix://, file://; empty: none"),
    ] = ""
    remote_bytes: Annotated[
        int, Meta(ge=1 << 20, description="most bytes of blocks in a shared folder")
    ] = 64 << 30
    remote_group: Annotated[
        bool, Meta(description="the user's group may read and write the shared folder, too")
    ] = False
    remote_lease_s: Annotated[
        Seconds, Meta(description="a block that nobody looks up there for this long goes")
    ] = 86400.0
    remote_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for an answer of that store")
    ] = 5.0
    remote_frequency: Annotated[
        Weight, Meta(description="blocks asked for this often go there; as disk-frequency")
    ] = 2.0
    peers: Annotated[
        bool, Meta(description="read blocks from the memory of other nodes; see transfer.host")
    ] = False
    tenant_share: Annotated[
        float, Meta(gt=0, le=1, description="most of a tier that one tenant may have kept longer")
    ] = 0.5
    retention: Annotated[
        list[str],
        Meta(description="defaults per kind of token, as KIND=PRIORITY or KIND=PRIORITY/SECONDS"),
    ] = []
    decay_s: Annotated[
        Seconds, Meta(description="a block counts as asked for once less after this long")
    ] = 300.0
    compute_patience_s: Annotated[
        Seconds, Meta(description="a worker that computes blocks silently this long is not awaited")
    ] = 30.0
    key: Annotated[
        Secret | None,
        Meta(description="64 hexadecimal digits under which blocks are named; none: the mesh's"),
    ] = None
    metrics_port: Annotated[Port, Meta(description="port of /metrics and /health; 0: none")] = 0
    metrics_host: MetricsHost = LOOPBACK


class MockSettings(Section, frozen=True, kw_only=True):
    blocks: Annotated[Count, Meta(description="KV blocks of each rank of the mock engine")] = 16384
    max_sequences: Annotated[Count, Meta(description="sequences per step")] = 256
    max_batched_tokens: Annotated[Count, Meta(description="tokens per step")] = 8192
    watermark: Annotated[
        float, Meta(ge=0, lt=1, description="share of blocks kept free when admitting")
    ] = 0.01
    dp_ranks: Annotated[int, Meta(ge=1, le=64, description="data-parallel ranks")] = 1
    speedup: Annotated[float, Meta(gt=0, description="how much faster than real time")] = 1.0
    profile: Annotated[
        Path | None, Meta(description="NPZ file of measured step times; none: a polynomial")
    ] = None
    startup_s: Annotated[float, Meta(ge=0, description="time that loading the model takes")] = 0.0
    tick_s: Annotated[
        float, Meta(ge=0, description="take decode steps together that fit into this long")
    ] = 0.0
    seed: Annotated[int, Meta(description="seed of the generated tokens")] = 0
    output_tokens: Annotated[
        Count, Meta(description="usual length of an answer that ends by itself; up to half differs")
    ] = 512
    reasoning_tokens: Annotated[
        int, Meta(ge=0, description="tokens of thinking before each answer; 0: none")
    ] = 0
    think_open: Annotated[str, Meta(description="how the model begins to think")] = "<think>\n"
    think_close: Annotated[str, Meta(description="how it stops thinking")] = "\n</think>\n\n"
    script: Annotated[
        Path | None, Meta(description="JSON lines: what to answer to which turn of which session")
    ] = None
    host_blocks: Annotated[
        int, Meta(ge=0, description="KV blocks of a host tier below each rank; 0: none")
    ] = 0
    disk_blocks: Annotated[
        int, Meta(ge=0, description="KV blocks of a disk tier below each rank; 0: none")
    ] = 0
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
    crash_step: Annotated[int, Meta(ge=0, description="the engine dies at this step; 0: never")] = 0
    hang_step: Annotated[int, Meta(ge=0, description="this step never ends; 0: none")] = 0
    poison: Annotated[
        str, Meta(description="a prompt that contains this text ends the engine; empty: none does")
    ] = ""
    poison_effect: Annotated[
        Literal["crash", "hang", "block"],
        Meta(description="it crashes, or takes no step more, or blocks its whole process"),
    ] = "crash"
    slow_step: Annotated[int, Meta(ge=0, description="steps are slow from this one; 0: never")] = 0
    slow_factor: Annotated[float, Meta(gt=0, description="how slow slow steps are")] = 10.0
    lose_every: Annotated[
        int, Meta(ge=0, description="every n-th batch of KV events is lost; 0: none")
    ] = 0


class TransferSettings(Section, frozen=True, kw_only=True):
    via: Annotated[
        Literal["auto", "nixl", "tcp"],
        Meta(description="how KV blocks move between processes; auto: NIXL if both have it"),
    ] = "auto"
    host: Annotated[str, Meta(description="address on which blocks are served to others")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="its port; 0: a free one")] = 0
    advertise: Annotated[
        str, Meta(description="address by which others reach it; empty: that of host")
    ] = ""
    readers: Annotated[Count, Meta(description="readers served at once")] = 64
    staging_bytes: Annotated[
        Count, Meta(description="memory of a prefill or decode worker for blocks on their way")
    ] = 1 << 30
    lend_s: Annotated[
        Seconds, Meta(description="a prompt's blocks wait this long for the worker that goes on")
    ] = 30.0
    timeout_s: Annotated[
        Seconds, Meta(description="after this long a prompt is computed instead of fetched")
    ] = 10.0


class TorchSettings(Section, frozen=True, kw_only=True):
    device: Annotated[str, Meta(description="torch device; auto: a GPU if there is one")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(description="type of weights and KV; auto: float32 on the CPU, else the model's own"),
    ] = "auto"
    blocks: Annotated[int, Meta(ge=0, description="KV blocks; 0: as many as kv-bytes holds")] = 0
    kv_bytes: Annotated[Count, Meta(description="memory for KV blocks, in bytes")] = 1 << 30
    max_sequences: Annotated[Count, Meta(description="sequences per step")] = 64
    max_batched_tokens: Annotated[Count, Meta(description="tokens per step")] = 512
    watermark: Annotated[
        float, Meta(ge=0, lt=1, description="share of blocks kept free when admitting")
    ] = 0.01
    pass_tokens: Annotated[
        int,
        Meta(
            ge=32,
            multiple_of=32,
            description="tokens of every forward pass, always as many so that results are exact",
        ),
    ] = 32
    threads: Annotated[
        int, Meta(ge=0, description="CPU threads; 0: half of the cores, as a power of two")
    ] = 0


class RemoteSettings(Section, frozen=True, kw_only=True):
    url: Annotated[Url, Meta(description="base URL of the running server of --engine openai")] = ""
    model: Annotated[str, Meta(description="its model; empty: the first that it lists")] = ""
    api_key: Annotated[Secret | None, Meta(description="key that it asks for")] = None
    api: Annotated[
        Literal["auto", "completions", "generate"],
        Meta(description="/v1/completions with token ids, or SGLang's /generate"),
    ] = "auto"
    priority: Annotated[
        Literal["none", "lower", "higher"],
        Meta(description="which priorities it serves first, if it schedules by them"),
    ] = "none"
    kv_events: Annotated[
        str, Meta(description="ZeroMQ endpoint of its KV events, of rank 0; empty: none")
    ] = ""
    kv_replay: Annotated[
        str, Meta(description="ZeroMQ endpoint that repeats them; empty: none")
    ] = ""
    kv_topic: Annotated[str, Meta(description="topic of its KV events")] = ""
    dp_ranks: Annotated[int, Meta(ge=1, le=64, description="data-parallel ranks")] = 1
    blocks: Annotated[
        Count, Meta(description="KV blocks of a rank, where the server does not say")
    ] = 16384
    max_sequences: Annotated[
        Count, Meta(description="sequences per step, where the server does not say")
    ] = 256
    max_batched_tokens: Annotated[Count, Meta(description="tokens per step")] = 8192
    probe_s: Annotated[Seconds, Meta(description="time between looks at its health and load")] = 1.0
    connect_timeout_s: Annotated[Seconds, Meta(description="longest wait for a connection")] = 5.0


class VllmSettings(Section, frozen=True, kw_only=True):
    args: Annotated[
        list[str],
        Meta(description="engine arguments as KEY=VALUE; a dot in KEY reaches into a nested one"),
    ] = []
    args_file: Annotated[
        Path | None, Meta(description="TOML file of engine arguments, before those of args")
    ] = None
    adapters: Annotated[list[str], Meta(description="LoRA adapters, as NAME=FOLDER")] = []
    kvbm: Annotated[
        bool, Meta(description="share KV blocks through the block manager of the node")
    ] = False


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


class UpSettings(Section, frozen=True, kw_only=True):
    workers: Annotated[int, Meta(ge=0, description="worker processes")] = 4
    prefill_workers: Annotated[
        int, Meta(ge=0, description="further ones that compute long prompts for them; 0: none")
    ] = 0
    kvbm: Annotated[
        bool, Meta(description="a block manager: memory and disk that the workers share for blocks")
    ] = False
    frontends: Annotated[
        int, Meta(ge=0, description="frontend processes, on consecutive ports")
    ] = 1
    routers: Annotated[int, Meta(ge=0, description="router processes")] = 1
    indexers: Annotated[int, Meta(ge=0, description="indexer processes")] = 1
    state_dir: Annotated[Path, Meta(description="where the embedded NATS server keeps streams")] = (
        Path(".kvmesh")
    )
    nats_port: Annotated[
        Port, Meta(description="port of the embedded NATS server; 0: a free one")
    ] = 4222
    metrics_port: Annotated[
        Port, Meta(description="first of consecutive /metrics ports, one per process; 0: none")
    ] = 0
    ready_timeout_s: Annotated[Seconds, Meta(description="longest wait until the mesh serves")] = (
        60.0
    )
    stop_timeout_s: Annotated[
        Seconds, Meta(description="longest wait for a process to stop before it is killed")
    ] = 10.0
    reset_states: Annotated[
        bool, Meta(description="start with empty streams and no index snapshots")
    ] = False


class Settings(Section, frozen=True, kw_only=True):
    """The whole configuration, one attribute per section."""

    nats: NatsSettings = NatsSettings()
    streams: StreamSettings = StreamSettings()
    log: LogSettings = LogSettings()
    process: ProcessSettings = ProcessSettings()
    frontend: FrontendSettings = FrontendSettings()
    router: RouterSettings = RouterSettings()
    indexer: IndexerSettings = IndexerSettings()
    worker: WorkerSettings = WorkerSettings()
    kvbm: KvbmSettings = KvbmSettings()
    mock: MockSettings = MockSettings()
    transfer: TransferSettings = TransferSettings()
    torch: TorchSettings = TorchSettings()
    remote: RemoteSettings = RemoteSettings()
    vllm: VllmSettings = VllmSettings()
    sglang: SglangSettings = SglangSettings()
    trtllm: TrtllmSettings = TrtllmSettings()
    up: UpSettings = UpSettings()
