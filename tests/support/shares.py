"""The cached part of each turn's prompt, beside what an exact replay would have found."""

from collections.abc import Sequence
from dataclasses import dataclass

from support.conversations import outline, predecessor
from support.harness import RecordedRequest
from support.tap import Tap

BLOCK = 16  # tokens, the default of `kvmesh up`
LEAST = 0.99
GENERATES = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


@dataclass(frozen=True)
class Turn:
    """One request, in tokens.

    `previous` is the index of the turn that it continues. `possible` is what it would find cached
    if its prompt began with the previous prompt and the answer just as it was generated.
    """

    request: RecordedRequest
    prompt: int
    cached: int
    output: int
    previous: int | None
    possible: int

    @property
    def share(self) -> float:
        return self.cached / self.possible if self.possible else 1.0


def generating(requests: Sequence[RecordedRequest]) -> list[RecordedRequest]:
    """The requests that generated an answer, in the order of their arrival."""
    kept = [r for r in requests if r.path.partition("?")[0] in GENERATES and r.status == 200]
    return sorted(kept, key=lambda request: request.arrived)


async def turns(requests: Sequence[RecordedRequest], tap: Tap) -> list[Turn]:
    """The turns that requests were, once their outcomes are known."""
    kept = generating(requests)
    outlines = [outline(request.body) for request in kept]
    found: list[Turn] = []
    for index, request in enumerate(kept):
        outcome = await tap.outcome_of(request.id)
        previous = predecessor(outlines, index)
        possible = 0
        if previous is not None:
            before = found[previous]
            # the engine has not computed the last token that it generated
            possible = (before.prompt + before.output - 1) // BLOCK * BLOCK
        prompt, output = outcome.prompt_tokens, outcome.output_tokens
        turn = Turn(request, prompt, outcome.cached_tokens, output, previous, possible)
        found.append(turn)
    return found


def assert_as_replayed(found: Sequence[Turn], least: float = LEAST) -> None:
    """Assert that each turn but the first ones found what an exact replay would find."""
    assert any(turn.previous is not None for turn in found), "no turn continues another one"
    lacking = [turn for turn in found if turn.previous is not None and turn.share < least]
    assert not lacking, "too little was cached:\n" + table(found)


def table(found: Sequence[Turn]) -> str:
    """The turns, one a line."""
    lines = [
        f"{index:3} after {'-' if turn.previous is None else turn.previous!s:>3}: prompt "
        f"{turn.prompt:6}, cached {turn.cached:6} of {turn.possible:6} possible"
        + (f", {turn.cached - turn.possible}" if turn.share < LEAST else "")
        for index, turn in enumerate(found)
    ]
    return "\n".join(lines)
