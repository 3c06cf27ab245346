"""The engine contract: implement `Engine` and register a factory in `FACTORIES` to add an engine.

The worker starts an engine once, with a sink. All calls come from one event loop, and neither calls
to the engine nor calls to the sink may block it. Optional abilities are protocols in
`kvmesh.worker.capabilities`: retention, prefetch, lower tiers; `constraints.compiler.Compiling`
compiles constraints before `submit`. Engines that wrap a server or a library share
`kvmesh.worker.adapters`; engines that schedule sequences themselves share
`kvmesh.worker.enginecore`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from kvmesh.blocks.attachment import ArenaUser
from kvmesh.blocks.kvbm_client import KvbmClient
from kvmesh.bus.messages import GENERATE, Capacity, Clear, KvEvent, KvLayout, Load, Work
from kvmesh.settings.schema import Settings
from kvmesh.weights.answer import WeightsAccess
from kvmesh.worker.clearing import ClearOutcome
from kvmesh.worker.start.timeline import StartTimeline

CLEAR_S = 8.0  # for which an engine waits until nothing uses its blocks


class EngineError(Exception):
    """The engine cannot start or has died; the message is for the operator."""


class EngineConfigError(EngineError):
    """The settings or a file that they name are wrong: a restart without a change fails again."""


class Rejected(Exception):
    """The engine refuses this work; `reason` is for the caller.

    `invalid`: the work is wrong; else the engine's settings are, and no retry here succeeds.
    """

    def __init__(self, reason: str, invalid: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.invalid = invalid


class Unsupported(Exception):
    """The engine lacks an ability that a command needs; the message is for the caller."""


class OutputDelta(Struct):
    """Output of one request since its previous delta: tokens in order, and at the end the reason.

    `finish` is "stop", "length", "abort" or "error". `cached` is the prompt tokens that were not
    computed, by tier; it comes with the first tokens, and again with the last if the first was an
    estimate. `handoff` comes with the end of a prefill: the engine-specific address of its KV for
    another engine of this kind.

    `retention` comes with `cached`: the outcome of each explicit directive for the prompt. `decode`
    comes with `finish`: the outcome of the directive for the output. Both are None if the engine
    does not report outcomes. `invalid` marks an "error" as the fault of the request, refused before
    it began.

    The first tokens come with the times, on the monotonic clock, at which the engine took the
    request from its queue (`admitted_at`) and at which its KV from elsewhere was there
    (`loaded_at`), if the engine reports them.

    `vectors` come with the end of a `Work.pooling`, as in `Chunk`.
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
    admitted_at: float | None = None
    loaded_at: float | None = None
    vectors: list[bytes] | None = None


class Sink(Protocol):
    """Receiver of an engine's output and events; calls are cheap and never wait."""

    def output(self, deltas: list[OutputDelta]) -> None:
        """Deliver the output of one step."""
        ...

    def events(self, rank: int, events: list[KvEvent]) -> None:
        """Deliver the changes of a rank's cache, in the order in which they happened."""
        ...

    def events_lost(self, rank: int, count: int) -> None:
        """Report `count` lost events: the index's view of the rank is wrong until a dump."""
        ...

    def failed(self, error: EngineError) -> None:
        """Report that the engine is dead; no call follows."""
        ...


NO_RETENTION = "no_retention"  # a kind of warning


class EngineInfo(Struct, frozen=True, kw_only=True):
    """Properties of a started engine; `context` bounds prompt plus output, in tokens.

    `structural_tags`: it accepts constraints of that kind in xgrammar's `format` trees.
    `exempts_thinking`: it follows constraints only after thinking has ended.
    `reports_outcomes`: it reports the outcome of each explicit directive; otherwise `retention` is
    the outcome of all, "honoured" if the engine receives them. `supports_handoff`: it offers the KV
    of prompts to other engines and fetches theirs; `needs_handoff`: it computes no prompts itself.
    `tiered`: it loads blocks from the kvbm of its node. `kv_layout` describes the KV layout as
    text, empty if unknown. `warnings` are abilities that it lacks although the settings ask for
    them: one line of text for each kind of warning. `devices` is the number of devices of one rank.
    `task` and `image_placeholder` are as in `ModelCard`: an engine gets no work of another task.
    """

    name: str
    version: str
    context: int
    block_size: int
    capacity: Capacity
    adapters: list[str] = []
    structural_tags: bool = False
    exempts_thinking: bool = False
    reports_outcomes: bool = False
    retention: str = "unsupported"
    supports_handoff: bool = False
    needs_handoff: bool = False
    tiered: bool = False
    kv_layout: str = ""
    warnings: dict[str, str] = {}
    devices: int = 1
    task: str = GENERATE
    image_placeholder: str = ""


class Engine(Protocol):
    """One model on one or more data-parallel ranks."""

    async def start(self, sink: Sink) -> EngineInfo:
        """Load the model and get ready for work; raises EngineError."""
        ...

    def submit(self, work: Work) -> None:
        """Queue one sequence, by priority (higher first) and then by arrival; raises Rejected."""
        ...

    def abort(self, request: str) -> bool:
        """Stop a request; its last delta has `finish` "abort". False if the request is unknown."""
        ...

    def load(self, instance: str) -> list[Load]:
        """The current load of each rank."""
        ...

    def dump(self, rank: int) -> None:
        """Send a `Cleared` and all stored blocks to the sink, in order with other events."""
        ...

    async def clear(self, command: Clear) -> ClearOutcome:
        """Drop the blocks that a command names, of its own and of the stores that it loads from.

        A namespace is a salt and a tenant. Tiers that the engine lacks have nothing to drop.
        Returns once no later prompt finds a dropped block, within about CLEAR_S; raises EngineError
        if the engine does not tell the outcome.
        """
        ...

    async def drain(self) -> None:
        """Return once no request runs or waits; the caller submits no more."""
        ...

    async def close(self) -> None:
        """Stop and free all resources; running requests get no more deltas."""
        ...


StoreFactory: TypeAlias = Callable[[KvLayout, ArenaUser], KvbmClient]


@dataclass(frozen=True)
class EngineContext:
    """Inputs of an engine factory; `folder` is a Hugging Face model folder.

    `store` creates a client of the node's kvbm; None outside a mesh. The engine tells `timeline`
    the phases of its start. `weights` says where the engine's loader finds weights from other
    workers; None: they are in the folder. `compiled` is the folder of its compile cache, if any.
    `begun` is what `begin_processes` returned. Parts with a connection to NATS of their own pass
    their name and the texts of their refused subjects to `on_refused`, at each change.
    """

    settings: Settings
    folder: Path
    store: StoreFactory | None = None
    timeline: StartTimeline = field(default_factory=StartTimeline)
    weights: WeightsAccess | None = None
    compiled: Path | None = None
    begun: Any = None
    on_refused: Callable[[str, Mapping[str, str]], None] = lambda _, __: None


EngineFactory: TypeAlias = Callable[[EngineContext], Engine]

FACTORIES = {
    "mock": "kvmesh.worker.engines.mock.engine:MockEngine",
    "torch": "kvmesh.worker.engines.torch.engine:TorchEngine",
    "vllm": "kvmesh.worker.engines.vllm.create:create",
    "openai": "kvmesh.worker.engines.remote.engine:create",
    "sglang": "kvmesh.worker.engines.sglang.engine:SglangEngine",
    "trtllm": "kvmesh.worker.engines.trtllm.engine:TrtllmEngine",
}


# what begins before the imports of an engine, beside them
BEGINNINGS = {"vllm": "kvmesh.worker.engines.vllm.fork_servers.servers:begin"}


def begin_processes(context: EngineContext) -> EngineContext:
    """Begin what the engine can begin before its packages are imported."""
    name = BEGINNINGS.get(context.settings.worker.engine)
    if name is None:
        return context
    module, _, function = name.partition(":")
    return replace(context, begun=getattr(import_module(module), function)(context))


def create_engine(context: EngineContext) -> Engine:
    """Create the engine that the settings name; raises as `engine_factory` does."""
    return engine_factory(context.settings.worker.engine)(context)


def engine_factory(name: str) -> EngineFactory:
    """The factory of an engine, whose module is imported only now, for seconds.

    Raises EngineConfigError if the packages that it needs are not installed.
    """
    module, _, function = FACTORIES[name].partition(":")
    try:
        factory: EngineFactory = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        raise not_installed(name, error) from error
    return factory


def not_installed(engine: str, error: ModuleNotFoundError) -> EngineConfigError:
    """The error for a missing package of an engine."""
    return EngineConfigError(
        f"the {engine} engine needs {error.name}: pip install 'kvmesh[{engine}]'"
    )
