"""A sequence to generate, and the state of its dispatch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.bus.messages import Routed
from kvmesh.frontend.dispatch.token_inbox import Consumer
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest, PromptTokens
from kvmesh.tracing.span import NO_SPAN, TraceSpan


@dataclass
class DispatchState:
    """State of one sequence's dispatch; only the dispatcher changes it.

    `deadline` is on the loop's clock, as is `wake_deadline`, which is set once the sequence waits
    for a worker of an idle model. `arrived` is the Unix time that orders the sequence in the
    routers' queues, the same in all queries. `exclude` lists instances that refused the sequence or
    were lost with it; `avoided` adds those that were silent when a router was last queried.
    `routed` is the last placement, `counted` that of the attempt whose engine counted the cached
    tokens. `refused` is set once a worker was busy or draining. `extended` is the prompt with the
    tokens generated before a migration. `handoff` locates the KV that a prefill worker has
    computed. `began` is the start of the dispatch on the loop's clock; `route_s` is the time in
    queries of routers, of which `wait_s` in their queues and `index_s` for the index.
    `migration` is the span of a migration in progress. `turned_away` says why the last worker that
    was asked did not go on, empty if none was.
    """

    deadline: float
    arrived: float | None = None
    wake_deadline: float | None = None
    exclude: Sequence[str] = ()
    avoided: Sequence[str] = ()
    refused: bool = False
    routed: Routed | None = None
    counted: Routed | None = None
    extended: PromptTokens | None = None
    handoff: dict[str, Any] | None = None
    began: float = 0.0
    route_s: float = 0.0
    wait_s: float = 0.0
    index_s: float = 0.0
    migration: TraceSpan = NO_SPAN
    turned_away: str = ""


@dataclass(frozen=True, eq=False)
class SequenceTask:
    """One choice's sequence to generate; `consumer` is called when `stream` has new tokens."""

    prepared: PreparedRequest
    prompt: PromptTokens
    index: int
    stream: TokenStream
    consumer: Consumer
    dispatch: DispatchState

    @property
    def model(self) -> str:
        return self.prepared.model.card.name

    @property
    def span(self) -> TraceSpan:
        """The first span of the request."""
        return self.prepared.request.span

    @property
    def current_prompt(self) -> PromptTokens:
        return self.dispatch.extended or self.prompt
