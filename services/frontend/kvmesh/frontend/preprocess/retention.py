"""Retention directives of a prompt, in tokens, for engines and the kvbm."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from kvmesh.bus.messages import Retain
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.preprocess.prompt_spans import PromptSpans
from kvmesh.frontend.tokenizer.prefix_cache import EncodedPrompt
from kvmesh.retention.hints import retained_prefixes

MAX_KINDS = 64
UNSUPPORTED = "unsupported"


class TokenOffsets:
    """Converts character offsets of a rendered prompt to token offsets, exactly at segment edges.

    An offset inside a segment is rounded down to the segment's edge unless `add` has given the
    tokens between them.
    """

    def __init__(self, prompt: EncodedPrompt) -> None:
        self._prompt = prompt
        self._added: dict[int, int] = {}

    def inside_segments(self, spans: PromptSpans) -> list[tuple[int, int]]:
        """(edge, offset) of all offsets in `spans` that are not at an edge, the last one first."""
        if not spans.marks and not spans.spans:
            return []
        thinking = [span for span in spans.spans if span.kind == "thinking"]
        offsets = {end for end, _ in spans.marks}
        offsets.update(offset for span in thinking for offset in (span.start, span.end))
        pairs = ((self._edge(offset), offset) for offset in sorted(offsets, reverse=True))
        return [(edge, offset) for edge, offset in pairs if edge != offset]

    def add(self, offset: int, tokens: bytes) -> None:
        """Set the packed tokens between the last edge before `offset` and `offset`."""
        self._added[offset] = len(tokens) // 4

    def at(self, offset: int) -> int:
        """Tokens before the character at `offset`."""
        segment = bisect_right(self._prompt.edges, offset) - 1
        return self._prompt.sizes[segment] // 4 + self._added.get(offset, 0)

    def _edge(self, offset: int) -> int:
        """The last edge at or before `offset`."""
        edges = self._prompt.edges
        return edges[bisect_right(edges, offset) - 1]


def explicit_retention(request: GenerateRequest) -> list[Retain]:
    """Directives that the caller gave for the whole prompt or for token ranges."""
    return [*retained_prefixes(_whole(request)), *request.retention]


def prompt_retention(
    request: GenerateRequest, spans: PromptSpans, offsets: TokenOffsets, block_size: int
) -> list[Retain]:
    """Kinds of the prompt's parts, then the caller's directives, which override them."""
    marks = [(end, ttl) for offset, ttl in spans.marks if (end := offsets.at(offset))]
    retained = retained_prefixes([*marks, *_whole(request)])
    return [*_kinds(spans, offsets, block_size), *retained, *request.retention]


def _whole(request: GenerateRequest) -> list[tuple[None, float]]:
    """The mark for the whole prompt, if the caller gave one."""
    return [] if request.prompt_ttl_s is None else [(None, request.prompt_ttl_s)]


def output_retention(
    request: GenerateRequest, begins_thinking: bool, drops_thinking: bool
) -> Retain | None:
    """Retention of the output: the caller's, or the kind of thinking, or none.

    No later prompt contains an output whose thinking it lacks. It lacks it if the client does not
    return thinking, or if the template drops it before the user's next message, which must follow
    where the model has no tools to call.
    """
    if request.decode is not None or not begins_thinking:
        return request.decode
    if not request.returns_thinking or (drops_thinking and not request.tools):
        return Retain(0, None, kind="thinking")
    return None


def _kinds(spans: PromptSpans, offsets: TokenOffsets, block_size: int) -> Iterator[Retain]:
    """The head and the newest MAX_KINDS spans, each shrunk to whole blocks."""
    head = offsets.at(spans.head) // block_size * block_size
    if head:
        yield Retain(0, head, kind="system")
    for span in spans.spans[-MAX_KINDS:]:
        start = -(-offsets.at(span.start) // block_size) * block_size
        end = offsets.at(span.end) // block_size * block_size
        if start < end:
            yield Retain(start, end, kind=span.kind)


def directive_outcomes(
    retention: Sequence[Retain], reported: Sequence[str]
) -> list[tuple[Retain, str]]:
    """Each explicit directive with its outcome; `reported` are the engine's, in their order."""
    explicit = [entry for entry in retention if entry.explicit]
    return [
        (entry, reported[index] if index < len(reported) else UNSUPPORTED)
        for index, entry in enumerate(explicit)
    ]
