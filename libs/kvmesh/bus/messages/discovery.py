"""Process descriptions, the values of leases in the bucket of instances; search for weights.

Cards, requests, salts and block digests contain identities, so a changed adapter shares no block
with the adapter of the same name before it. An engine that does not know the content of its
adapters has bare names as identities.
"""

import re
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, Any

from msgspec import Meta, Struct

MAX_NUMBER = 1 << 40  # beyond any engine: a card that states more is malformed
MAX_COUNT = 1 << 53  # of what an engine counts: tokens of centuries
MAX_RANKS = 1024  # of one worker: routers and indexers hold state of each
MAX_NAME = 256  # characters: names become parts of subjects, whose length a server bounds
MAX_ADAPTERS = 4096  # of one worker: each is a model in the API
GENERATE, EMBED, SCORE = "generate", "embed", "score"  # tasks of models
DIGITS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_IDENTITY = re.compile(rf"(.+)@[0-9a-f]{{{DIGITS}}}", re.DOTALL)


Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Positive = Annotated[float, Meta(ge=0.0, le=MAX_COUNT)]
Real = Annotated[float, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]  # a variance may be rounded below 0


class Load(Struct, frozen=True, kw_only=True):
    """Load and counters of one rank. Blocks and waiting tokens are current; counters since start.

    `step_s` is the mean duration of the latest steps. `busy_s` is the total time in steps, 0 if the
    engine does not report it; `computed_tokens` counts computed prompt tokens. A server's steps and
    their time are read together, less often than tokens are counted: compare reports with different
    `steps`.

    The batch: `decoding` sequences get a token per step; `decode_tokens` is the sum of their KV
    lengths in tokens, `decode_var` the variance. `waiting_tokens` is the part of `prefill_tokens`
    of the sequences in the queue, `waiting_var` the variance of their lengths. `prefill_steps`
    counts the steps that computed prompt tokens. Engines that return a stream per request count a
    request as decoding from its first token on, take the latest ones as waiting, and report no
    `prefill_steps` (vLLM does with `vllm.retention`). 0 is unknown.

    `load_ratio` is the time to load a block from the node's kvbm over the time to compute it.

    A report with a number that no engine has is malformed: it would spoil what compares engines.
    """

    instance: str
    rank: Count
    running: Count
    waiting: Count
    active_blocks: Count
    cached_blocks: Count
    total_blocks: Count
    prefill_tokens: Count
    steps: Count
    prompt_tokens: Count
    cached_tokens: Count
    output_tokens: Count
    requests: Count
    preemptions: Count = 0
    aborted: Count = 0
    step_s: Positive = 0.0
    busy_s: Positive = 0.0
    computed_tokens: Count = 0
    decoding: Count = 0
    decode_tokens: Count = 0
    decode_var: Real = 0.0
    waiting_tokens: Count = 0
    waiting_var: Real = 0.0
    prefill_steps: Count = 0
    load_ratio: Positive = 0.0


def adapter_identity(name: str, digest: str) -> str:
    """The identity of an adapter whose content has this digest of DIGITS hexadecimal digits."""
    return f"{name}@{digest}"


def adapter_name(identity: str) -> str:
    """The name for callers of an adapter."""
    match = _IDENTITY.fullmatch(identity)
    return match[1] if match else identity


def is_adapter_name(text: str) -> bool:
    """True if an adapter may have this name."""
    return _NAME.fullmatch(text) is not None


Name = Annotated[str, Meta(max_length=MAX_NAME)]


class Role(StrEnum):
    """Role of a process; the first part of its key in the bucket of instances.

    A worker is PARKED until it is promoted, and then a WORKER, of the same instance.
    """

    FRONTEND = "frontend"
    ROUTER = "router"
    INDEXER = "indexer"
    WORKER = "worker"
    PARKED = "parked"
    KVBM = "kvbm"
    PLANNER = "planner"


class WorkerState(StrEnum):
    """The state of a worker, which its card tells, a report of its start, or that its card is gone.

    From its start it serves, or is on standby: it waits without a device until it is promoted, so
    that it starts again, shorter. One that serves drains before it goes on standby or leaves; if
    nobody else can continue its requests, it serves on.
    """

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STANDBY = "standby"
    GONE = "gone"


class ModelCard(Struct, frozen=True, kw_only=True):
    """The model that a worker serves.

    `context` is in tokens, `block_size` in tokens per block; `files` is a digest in the model
    store. `adapters` are the identities of its LoRA adapters; of those with one name, the first
    serves new requests. `image_placeholder` is the text of the token that stands for an image where
    the chat template shows one, empty if the model reads no images. `structural_tags`: the engine
    supports `Guided` of that kind; `exempts_thinking`: it follows a `Guided` only once thinking has
    ended. Workers of one model must agree on the fields from `hash_version` on, empty if unknown
    (`kvmesh.bus.discovery.compatibility`): the version of the block hashes, digests of the
    tokenizer, the chat template and config.json, the revision of the weights, a summary of the
    engine's KV layout, and the digest of the manifest of the weights (`kvmesh.weights`). They agree
    on the `task`, too: "generate", or as in `Pooling`.
    """

    name: Name
    context: Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
    block_size: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
    files: str
    adapters: Annotated[list[str], Meta(max_length=MAX_ADAPTERS)] = []
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    image_placeholder: str = ""
    structural_tags: bool = False
    exempts_thinking: bool = False
    hash_version: int = 0
    tokenizer: str = ""
    template: str = ""
    config: str = ""
    revision: str = ""
    kv_layout: str = ""
    weights: str = ""
    task: str = GENERATE


class Capacity(Struct, frozen=True, kw_only=True):
    """Limits of one engine: KV blocks per rank; sequences and tokens of one scheduling step."""

    blocks: Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
    max_sequences: Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
    max_batched_tokens: Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
    dp_ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    tier_blocks: list[int] = []


class NodeStore(Struct, frozen=True, kw_only=True):
    """The block tiers of one node, on the card of its kvbm. Sizes are those of tiers 1, 2 and 3.

    `directory` holds the arena and the locks of the node's workers. `models` lists the models whose
    blocks the kvbm holds; a model's index in it is its rank in KV events. `tier_blocks` is the
    capacity of each tier in blocks of all models, empty if unknown. `endpoint` describes how other
    nodes read the arena over the same transport. If blocks are shared with other nodes, `layouts`
    are the layout summaries of its workers by model, and `key` is the fingerprint of the key of
    block digests. `restores` is "on" if the kvbm restores blocks before returns, "trial" or "off"
    if it measures whether that pays, and empty if it never does.
    """

    directory: str
    tier_bytes: list[int]
    tier_blocks: list[int] = []
    models: list[str] = []
    endpoint: dict[str, Any] = {}
    layouts: dict[str, list[str]] = {}
    key: str = ""
    restores: str = ""


class StartPhase(StrEnum):
    """The phases of a worker's start, in the order in which they are listed.

    From the creation of the process to the first line of its program; imports of packages, in
    the engine's processes as well; the settings, the model folder and the engine's arguments;
    the time between all of the start that needs no device and the promotion, which is no part
    of the start-up time; loading the weights; bringing them into the form that kernels read;
    allocation of the KV blocks; compiling, or loading what was compiled; other runs before the
    first request, such as those that measure memory or capture graphs; what else the engine's
    start takes; connecting to the mesh and joining it; and the time until routers can see the
    worker.
    """

    PROCESS = "process"
    IMPORTS = "imports"
    CONFIGURATION = "configuration"
    PARKED = "parked"
    WEIGHTS = "weights"
    POST_PROCESSING = "post-processing"
    KV_ALLOCATION = "KV allocation"
    COMPILE = "compile"
    WARM_UP = "warm-up"
    ENGINE = "engine"
    REGISTRATION = "registration"
    ROUTABLE = "routable"


class Phase(Struct, frozen=True):
    """Seconds that a worker's start spent in one phase, a `StartPhase`.

    Phases exclude each other: at a time at which several processes are in different ones, the first
    of these counts.
    """

    name: str
    seconds: float


class StartSource(Struct, frozen=True):
    """A source of what an engine started with: `bytes` of a part of it.

    `part` is "weights" or "code", which was compiled before. `source` is "disk", "workers", "store"
    for the mesh's store of models, or "memory" for what was in the node's memory already;
    "compiled" if the engine found no code.
    """

    part: str
    source: str
    bytes: int = 0


class CompiledOffer(Struct, frozen=True):
    """An archive of compiled code that a worker serves to workers of its trust domain.

    `environment` names what the code was compiled for, `archive` is the digest of the manifest, and
    `mac` proves by the domain's key that they belong together (`kvmesh.worker.compiled`).
    """

    environment: str
    archive: str
    mac: str


class AdapterFiles(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The files of a LoRA adapter that a worker offers to others, whether it is loaded or not.

    `adapter` is its identity, `digest` the name of the copy of its files (`kvmesh.weights`), `size`
    their bytes. The worker's engine took `load_s` seconds to load it; 0 if it has not yet.
    """

    adapter: str
    digest: str
    size: int
    load_s: float = 0.0


class AdapterHost(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that loads adapters whose files others offer, up to `limit` at once.

    It may unload the `removable` ones to make room. `files` are those that it offers.
    """

    limit: int
    removable: list[str] = []
    files: list[AdapterFiles] = []


class Settled(Struct, frozen=True, omit_defaults=True):
    """A router's or frontend's statement of the workers by which it serves `model`.

    `kinds` are digests of the facts that these state, `card` of the model card that is served:
    workers that differ join as they can, and change nothing.
    """

    model: str
    kinds: list[str]
    card: str = ""


class Starting(Struct, frozen=True, kw_only=True):
    """A worker that has not joined yet, about every second until it does or fails.

    `phase` has lasted since the Unix time `since`, and the whole start since `started`: the
    creation of its process. `phases` are those that took time before.
    """

    instance: str
    model: str
    engine: str
    phase: str
    since: float
    started: float
    phases: list[Phase] = []


class FailedStart(Struct, frozen=True, kw_only=True):
    """The latest start of a worker that failed, in its `phase`, with the reason.

    `started` and `failed` are Unix seconds; `final`: the worker rejects its settings, so that a
    restart would fail again.
    """

    instance: str
    model: str
    engine: str
    phase: str
    started: float
    failed: float
    error: str
    final: bool = False


class Instance(Struct, frozen=True, kw_only=True):
    """One process on the mesh: the value of its lease. `name` is stable across restarts.

    `started` is the time at which it joined, in Unix seconds of the NATS server's clock. `node`
    names the machine whose memory and disks it can reach. A worker that `needs_handoff` computes
    no prompts: each of its requests needs a prefill worker. `warnings` are problems of the mesh
    that the process has detected and that do not stop it from serving. `startup_s` are the seconds
    from the creation of a worker's process until routers could see it, less those in which it was
    parked, 0 if unknown; `phases` says where they went. `promoted_s` are those from its promotion
    on, 0 if it was not parked. A parked worker will serve the model named `parked_for`, and has
    no `model` card before it does. Routers send forecasts of returns to a kvbm that
    `expects_returns`. `compiled` is the compile cache that a worker offers, if
    any. `adapters` says which LoRA adapters it can load for routers; it is None if it loads none.
    `sources` tells where a worker's weights and compiled code came from, as far as known. A worker
    that `sleeps` can free its device and wait to be promoted again; a parked one is `asleep` if it
    has `served` a model before, whose weights it still offers, and its `phases` and `startup_s` are
    those of its start. A router or indexer that `completes_prompts` takes deltas of
    sequence hashes. A reader of the route stream that `unpacks` takes packs of its messages.
    Routers and frontends state what they have `settled` of the models that they serve.
    """

    instance: Name
    role: Role
    name: Name
    version: str
    started: float
    model: ModelCard | None = None
    capacity: Capacity | None = None
    engine: str | None = None
    serves: str = "aggregated"
    needs_handoff: bool = False
    draining: bool = False
    endpoint: str | None = None
    labels: dict[str, str] = {}
    node: Name = ""
    store: NodeStore | None = None
    warnings: list[str] = []
    startup_s: float = 0.0
    phases: list[Phase] = []
    expects_returns: bool = False
    parked_for: Name = ""
    promoted_s: float = 0.0
    compiled: CompiledOffer | None = None
    adapters: AdapterHost | None = None
    sources: list[StartSource] = []
    sleeps: bool = False
    asleep: bool = False
    served: ModelCard | None = None
    completes_prompts: bool = False
    unpacks: bool = False
    settled: list[Settled] = []

    @property
    def state(self) -> WorkerState:
        """The state of a worker with this card."""
        if self.role is Role.PARKED:
            return WorkerState.STANDBY
        return WorkerState.DRAINING if self.draining else WorkerState.SERVING


def instance_number(instance: str) -> int:
    """A number for an instance, for clients whose ids of workers are integers: below 2^53."""
    return int.from_bytes(blake2b(instance.encode(), digest_size=8).digest()) >> 11


class WeightQuery(Struct, frozen=True, omit_defaults=True):
    """Query for sources of the copy of weights with `digest`; all that have chunks hear it.

    Only those reply whose draw for `query` is at least `above` and below `share`, both in [0, 1]:
    the query is repeated with larger shares until enough have replied. `instance` asks.
    """

    digest: str
    query: str
    share: float = 1.0
    above: float = 0.0
    instance: str = ""


class WeightOffer(Struct, frozen=True, omit_defaults=True):
    """A source of a copy of weights, on `node`: descriptors of grants for its files, in order.

    `have` is the descriptor of a grant for one byte per chunk: 1 if it is there, 2 if it is on its
    way, 3 if it is there and was sent to another worker of late. `complete`: all chunks are there.
    """

    instance: str
    digest: str
    files: list[bytes]
    have: bytes
    complete: bool = False
    node: str = ""
