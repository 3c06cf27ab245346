"""What a request asks for the blocks of its prompt, in tokens, for engine and block manager."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from kvmesh.bus.messages import Retain
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.preprocess.prompt_spans import PromptSpans
from kvmesh.frontend.tokenizer.prefix_cache import EncodedPrompt
from kvmesh.hashing import TOKEN_BYTES

KEEP = 75  # priority of what a caller asks to keep for a time
MAX_KINDS = 64
UNSUPPORTED = "unsupported"


class TokenOffsets:
    """Measures a rendered prompt in tokens: exact at the edges of its segments.

    Within one it needs the tokens of the segment's beginning, which `cuts` lists.
    """

    def __init__(self, whole: EncodedPrompt) -> None:
        self._whole = whole
        self._known: dict[int, int] = {}

    def cuts(self, survey: PromptSpans) -> list[tuple[int, int]]:
        """Places of a survey that are not at an edge, the last one first, after their edges."""
        thinking = [span for span in survey.spans if span.kind == "thinking"]
        places = {end for end, _ in survey.marks}
        places.update(place for span in thinking for place in (span.start, span.end))
        found = ((self._edge(place), place) for place in sorted(places, reverse=True))
        return [(edge, place) for edge, place in found if edge != place]

    def cut(self, place: int, tokens: bytes) -> None:
        self._known[place] = len(tokens) // TOKEN_BYTES

    def at(self, place: int) -> int:
        """How many tokens are before a character."""
        segment = bisect_right(self._whole.edges, place) - 1
        return self._whole.sizes[segment] // TOKEN_BYTES + self._known.get(place, 0)

    def _edge(self, place: int) -> int:
        """The last edge that is not behind it."""
        edges = self._whole.edges
        return edges[bisect_right(edges, place) - 1]


def directives(request: GenerateRequest) -> list[Retain]:
    """What the caller said outright of the whole prompt or of its tokens."""
    whole = [] if request.keep_s is None else [_keep(None, request.keep_s)]
    return [*whole, *request.retention]


def retained(
    request: GenerateRequest, survey: PromptSpans, ruler: TokenOffsets, block_size: int
) -> list[Retain]:
    """Kinds of the prompt's parts, then what the caller asked for: later entries win."""
    kept = [*kinds(survey, ruler, block_size), *_marks(request, survey, ruler)]
    return [*kept, *request.retention]


def kinds(survey: PromptSpans, ruler: TokenOffsets, block_size: int) -> Iterator[Retain]:
    """The head, and the newest of the other parts that fill a block; inner blocks only."""
    head = ruler.at(survey.head) // block_size * block_size
    if head:
        yield Retain(0, head, kind="system")
    for span in survey.spans[-MAX_KINDS:]:
        start = -(-ruler.at(span.start) // block_size) * block_size
        end = ruler.at(span.end) // block_size * block_size
        if start < end:
            yield Retain(start, end, kind=span.kind)


def outcomes(kept: Sequence[Retain], told: Sequence[str]) -> list[tuple[Retain, str]]:
    """What came of each directive, as an engine has told in the order in which it got them."""
    asked = [entry for entry in kept if entry.explicit]
    return [
        (entry, told[place] if place < len(told) else UNSUPPORTED)
        for place, entry in enumerate(asked)
    ]


def _marks(request: GenerateRequest, survey: PromptSpans, ruler: TokenOffsets) -> Iterator[Retain]:
    """One entry for each time to live, up to the last mark that has it, the longest time last."""
    ends: dict[float, int | None] = {}
    for place, ttl in survey.marks:
        if end := ruler.at(place):
            ends[ttl] = max(end, ends.get(ttl) or 0)
    if request.keep_s is not None:
        ends[request.keep_s] = None
    for ttl in sorted(ends):
        yield _keep(ends[ttl], ttl)


def _keep(end: int | None, ttl_s: float) -> Retain:
    return Retain(0, end, KEEP, ttl_s, explicit=True)
