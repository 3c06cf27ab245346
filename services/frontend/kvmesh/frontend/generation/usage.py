"""Token counts of a request."""

from collections.abc import Callable, Sequence
from typing import Any

from kvmesh.frontend.apis.base import Renderer, Usage
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.generation.nvext import retained_tokens
from kvmesh.frontend.generation.output import OutputPipeline
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest

HOUR_S = 3600.0


class UsageCounter:
    """Counts the whole request; each prompt counts once, however many choices it has.

    `diagnose` returns the diagnosis of the cache, if the request asks for it.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        streams: Sequence[TokenStream],
        pipelines: Sequence[OutputPipeline],
        diagnose: Callable[[], dict[str, Any] | None],
    ) -> None:
        self._prepared = prepared
        self._streams = streams
        self._pipelines = pipelines
        self._diagnose = diagnose

    @property
    def output_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self._streams)

    def usage(self) -> Usage:
        prepared = self._prepared
        block_size = prepared.model.card.block_size
        cached = stored = stored_1h = 0
        first_choices = self._streams[:: prepared.request.n]
        for prompt, stream in zip(prepared.prompts, first_choices, strict=True):
            hit = sum(stream.cached or [])
            new = max(prompt.count // block_size * block_size - hit, 0)
            cached += hit
            stored += new
            stored_1h += min(max(retained_tokens(prompt, stream, HOUR_S) - hit, 0), new)
        return Usage(
            prompt=prepared.prompt_tokens,
            cached=cached,
            stored=stored,
            output=self.output_tokens,
            reasoning=sum(pipeline.reasoning_tokens for pipeline in self._pipelines),
            stored_1h=stored_1h,
            diagnostics=self._diagnose(),
        )


class Opening:
    """The frame before the first events of an answer, once."""

    def __init__(self, renderer: Renderer, counter: UsageCounter) -> None:
        self._renderer = renderer
        self._counter = counter
        self._sent = False

    def __call__(self) -> bytes:
        if self._sent:
            return b""
        self._sent = True
        return self._renderer.started(self._counter.usage)
