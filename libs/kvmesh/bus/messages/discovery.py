"""Process descriptions, published as the values of leases in the bucket of instances."""

from enum import StrEnum
from typing import Any

from msgspec import Struct


class Role(StrEnum):
    """What a process does; the first part of its key in the instances bucket."""

    FRONTEND = "frontend"
    ROUTER = "router"
    INDEXER = "indexer"
    WORKER = "worker"
    KVBM = "kvbm"


class ModelCard(Struct, frozen=True, kw_only=True):
    """What a worker serves. Sizes in tokens and blocks; `files` is a digest in the model store.

    `structural_tags`: the engine follows `Guided` of that kind. The rest is what workers of one
    model must agree on (`kvmesh.bus.compatibility`), empty if not known: the version of the hashes
    of blocks, digests of the tokenizer, of the chat template and of config.json, the revision of
    the weights, and how the engine lays KV out, in words.
    """

    name: str
    context: int
    block_size: int
    files: str
    adapters: list[str] = []
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    images: bool = False
    structural_tags: bool = False
    hash_version: int = 0
    tokenizer: str = ""
    template: str = ""
    config: str = ""
    revision: str = ""
    kv_layout: str = ""


class Capacity(Struct, frozen=True, kw_only=True):
    """Limits of one engine: KV blocks per rank, and what one scheduling step may hold."""

    blocks: int
    max_sequences: int
    max_batched_tokens: int
    dp_ranks: int = 1
    tier_blocks: list[int] = []


class NodeStore(Struct, frozen=True, kw_only=True):
    """The block tiers of one node, on the card of its kvbm. Sizes in bytes, for tiers 1, 2 and 3.

    `directory` is where the node's workers find the arena and put their locks; `models` lists what
    it holds blocks of: a model's place in it is its rank in KV events. `tier_blocks` says how many
    blocks of all models together each tier can have; it is empty if that is not known. `endpoint`
    describes, to whoever uses the same transport, how the arena is read from other nodes. If blocks
    are shared with other nodes, `layouts` are those of its workers by model, in words, and `key` is
    the fingerprint of the key that names them.
    """

    directory: str
    tier_bytes: list[int]
    tier_blocks: list[int] = []
    models: list[str] = []
    endpoint: dict[str, Any] = {}
    layouts: dict[str, list[str]] = {}
    key: str = ""


class Instance(Struct, frozen=True, kw_only=True):
    """One process on the mesh: the value of its lease. `name` stays over restarts.

    `started` is when it joined, by the clock of the NATS server, in Unix seconds. `node` names the
    machine whose memory and disks it can reach. `warnings` are what the process sees to be wrong on
    the mesh while it goes on serving.
    """

    instance: str
    role: Role
    name: str
    version: str
    started: float
    model: ModelCard | None = None
    capacity: Capacity | None = None
    engine: str | None = None
    serves: str = "aggregated"
    draining: bool = False
    endpoint: str | None = None
    labels: dict[str, str] = {}
    node: str = ""
    store: NodeStore | None = None
    warnings: list[str] = []
