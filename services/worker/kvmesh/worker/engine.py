"""What the mesh asks of an engine, whichever one it is; its dialect ends in its adapter.

An engine is started once with a sink, to which it then hands everything that happens. All calls
come from one event loop and none of them may block it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from kvmesh.blocks.attachment import ArenaUser
from kvmesh.blocks.kvbm_client import KvbmClient
from kvmesh.bus.messages import Capacity, KvEvent, KvLayout, Load, Work
from kvmesh.settings.schema import Settings


class EngineError(Exception):
    """The engine cannot start or has died; the message is for the person who runs it."""


class EngineConfigError(EngineError):
    """The settings or a file that they name are wrong: starting again the same way is no use."""


class Rejected(Exception):
    """The engine will not take this work; `reason` is for the caller."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unsupported(Exception):
    """This engine cannot do what it is told; the message says what, for the caller."""


class OutputDelta(Struct):
    """News of one request: tokens in order, and on the last one why it ended.

    `finish` is "stop", "length", "abort" or "error"; `cached` is prompt tokens that were not
    computed, per tier, and comes with the first tokens. `handoff` comes with the end of a prefill:
    where another engine of this kind finds its KV. `retention` comes with `cached`: what came of
    each explicit directive for the prompt, and `decode` with `finish`: what came of that for the
    answer, if the engine tells. `invalid` says of an "error" that the request is at fault, and was
    refused before it began.
    """

    request: str
    tokens: list[int]
    finish: str | None = None
    error: str | None = None
    cached: list[int] | None = None
    logprobs: list[dict[int, float]] | None = None
    handoff: dict[str, Any] | None = None
    retention: list[str] | None = None
    decode: str | None = None
    invalid: bool = False


class Sink(Protocol):
    """Where an engine's news goes. Calls are cheap and never wait."""

    def output(self, deltas: list[OutputDelta]) -> None:
        """What one step produced."""
        ...

    def events(self, rank: int, events: list[KvEvent]) -> None:
        """What a rank's cache gained and lost, in the order in which it happened."""
        ...

    def lost(self, rank: int, count: int) -> None:
        """`count` events were lost on the way here: what is known of the rank is wrong now."""
        ...

    def failed(self, error: EngineError) -> None:
        """The engine is dead; nothing follows."""
        ...


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What a started engine is. `context` bounds prompt plus output, in tokens.

    `structural_tags`: it takes constraints of that kind in xgrammar's `format` trees. `retention`
    is what comes of explicit directives where the engine does not tell: "honoured" if it is given
    them. `hands_off`: it leaves the KV of prompts for other engines, and fetches what they left.
    `tiered`: it loads blocks from the block manager of its node. `kv_layout` says in words how KV
    is laid out, if it is known.
    """

    name: str
    version: str
    context: int
    block_size: int
    capacity: Capacity
    adapters: list[str] = []
    structural_tags: bool = False
    retention: str = "unsupported"
    hands_off: bool = False
    tiered: bool = False
    kv_layout: str = ""


class Engine(Protocol):
    """One model on one or more data-parallel ranks."""

    async def start(self, sink: Sink) -> EngineInfo:
        """Load the model and be ready for work; raises EngineError."""
        ...

    def submit(self, work: Work) -> None:
        """Queue one sequence, by priority (higher first) and then by arrival; raises Rejected."""
        ...

    def abort(self, request: str) -> bool:
        """Stop generating; a last delta says "abort". False if the request is not here."""
        ...

    def load(self, instance: str) -> list[Load]:
        """The load of each rank now."""
        ...

    def dump(self, rank: int) -> None:
        """Hand the sink a `Cleared` and all that is stored, in order with other events."""
        ...

    def clear(self) -> None:
        """Drop every cached block that no running request uses; raises Unsupported."""
        ...

    async def drain(self) -> None:
        """Return once no request runs or waits; the caller submits no more."""
        ...

    async def close(self) -> None:
        """Stop and free everything; running requests get no more deltas."""
        ...


StoreFactory: TypeAlias = Callable[[KvLayout, ArenaUser], KvbmClient]


@dataclass(frozen=True)
class EngineContext:
    """What a factory builds an engine from; `folder` is a Hugging Face model folder.

    `store` makes its client of the node's block manager, if it is on a mesh.
    """

    settings: Settings
    folder: Path
    store: StoreFactory | None = None


EngineFactory: TypeAlias = Callable[[EngineContext], Engine]

FACTORIES = {
    "mock": "kvmesh.worker.engines.mock.engine:create",
    "torch": "kvmesh.worker.engines.torch.engine:create",
    "vllm": "kvmesh.worker.engines.vllm.engine:create",
    "openai": "kvmesh.worker.engines.remote.engine:create",
    "sglang": "kvmesh.worker.engines.sglang.engine:create",
    "trtllm": "kvmesh.worker.engines.trtllm.engine:create",
}


def create_engine(context: EngineContext) -> Engine:
    """The engine that the settings name; its module is imported only now.

    Raises ConfigError if the packages that it needs are not installed.
    """
    name = context.settings.worker.engine
    module, _, function = FACTORIES[name].partition(":")
    try:
        factory: EngineFactory = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        raise not_installed(name, error) from error
    return factory(context)


def not_installed(engine: str, error: ModuleNotFoundError) -> EngineConfigError:
    """What to say when a package is missing."""
    return EngineConfigError(
        f"the {engine} engine needs {error.name}: pip install 'kvmesh[{engine}]'"
    )
