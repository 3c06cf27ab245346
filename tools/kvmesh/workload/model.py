"""The internal form of a workload: rounds (requests) in sessions over one token tree.

It holds no text and no token ids: only the prefixes that prompts share, the lengths of prompts and
outputs, and the time or the rounds that each request waits for. docs/workloads.md has examples.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from kvmesh.workload.tree import Tree

# Upper bound of tokens and seconds; larger values are defects of a trace.
LIMIT = 100_000_000
Tokens = Annotated[int, Meta(ge=0, le=LIMIT)]
SomeTokens = Annotated[int, Meta(ge=1, le=LIMIT)]
Seconds = Annotated[float, Meta(ge=0, le=LIMIT)]
Milliseconds = Annotated[float, Meta(ge=0, le=LIMIT * 1e3)]
Priority = Annotated[int, Meta(ge=-LIMIT, le=LIMIT)]
HUMAN, TOOL, PAUSE = "human", "tool", "pause"


class Round(Struct, frozen=True, kw_only=True, gc=False):
    """One request.

    Without `after` (indices of rounds), it starts `at_s` seconds after the start of the workload;
    otherwise `at_s` seconds after the end of the last round in `after`.

    The prompt is `(branch, input_tokens)`; after generation the engine holds `(output_branch,
    input_tokens + output_tokens)`. `output_branch == branch` means that later prompts contain the
    output as generated.

    `rendered` is (branch, tokens) of the conversation with this output as the next prompt of the
    session contains it, up to what the client adds. Without it, that is the prompt with the output,
    less the thinking if `output_branch` is another branch.

    `wait` names the client's activity before this round ("human", a tool's name, "tool" for any
    tool, or "pause" if it is not known), `wait_class` the class of that tool's arguments. A human
    takes `approval_s` of `at_s` to approve the tool call.

    `marks` are the client's cache marks: (prompt tokens up to the mark, time to live
    in seconds). `osl` is the output length that the client expects, 0 if it says nothing.
    `fair_class` is the class that the client names in the header `x-kvmesh-fair-class`.
    After `abort_after` output tokens the client disconnects.
    """

    session: int
    branch: int
    output_branch: int
    input_tokens: SomeTokens
    output_tokens: Tokens
    at_s: Seconds = 0.0
    after: tuple[int, ...] = ()
    wait: str = ""
    wait_class: str = ""
    approval_s: Seconds = 0.0
    marks: tuple[tuple[SomeTokens, Seconds], ...] = ()
    osl: Tokens = 0
    priority: Priority = 0
    fair_class: str = ""
    thinking_tokens: Tokens = 0
    rendered: tuple[int, SomeTokens] | None = None
    abort_after: SomeTokens | None = None

    def as_rendered(self, generated: int) -> tuple[int, int]:
        """(branch, tokens) that the next prompt begins with after `generated` output tokens."""
        if self.rendered is not None:
            return self.rendered
        dropped = 0 if self.output_branch == self.branch else self.thinking_tokens
        return self.branch, self.input_tokens + max(generated - dropped, 0)

    def waited_for(self) -> list[str]:
        """The wait before this round as a live frontend names it: from coarse to fine."""
        if self.wait == HUMAN:
            return [HUMAN]
        if self.wait in ("", PAUSE):
            return []
        return [TOOL, *[part for part in (self.wait, self.wait_class) if part not in ("", TOOL)]]


def wait_of(waits_for: Sequence[str]) -> tuple[str, str]:
    """`wait` and `wait_class` of the round that ends a wait given as in `Outcome.waits_for`."""
    kind = waits_for[0] if waits_for else PAUSE
    if kind != TOOL:
        return HUMAN if kind == HUMAN else PAUSE, ""
    name = waits_for[1] if len(waits_for) > 1 else TOOL
    return name, waits_for[2] if len(waits_for) > 2 else ""


class Session(Struct, frozen=True, kw_only=True, gc=False):
    """One agent's chain of rounds; `parent` is the index of the session that spawned it.

    With `ends`, the client marks the last round as the session's final one.
    """

    name: str
    kind: str = ""
    parent: int | None = None
    ends: bool = False


class Workload(Struct, kw_only=True):
    """Rounds in topological order: each follows all rounds that it waits for.

    `block_size` is the resolution of prefix sharing in tokens; 1 is exact.
    """

    tree: Tree
    sessions: list[Session]
    rounds: list[Round]
    block_size: int = 1

    def __len__(self) -> int:
        return len(self.rounds)

    def first(self, count: int | None) -> "Workload":
        """The first `count` rounds; by their order, they wait for no later round."""
        if count is None or count >= len(self.rounds):
            return self
        return Workload(
            tree=self.tree,
            sessions=self.sessions,
            rounds=self.rounds[:count],
            block_size=self.block_size,
        )

    def by_session(self) -> Iterator[list[int]]:
        """Indices of each session's rounds, in order."""
        members: list[list[int]] = [[] for _ in self.sessions]
        for index, round_ in enumerate(self.rounds):
            members[round_.session].append(index)
        return iter(members)

    def following(self) -> list[int | None]:
        """The index of the next round of the same session, for each round."""
        following: list[int | None] = [None] * len(self.rounds)
        latest: dict[int, int] = {}
        for index, round_ in enumerate(self.rounds):
            before = latest.get(round_.session)
            if before is not None:
                following[before] = index
            latest[round_.session] = index
        return following

    def final_rounds(self) -> set[int]:
        """Indices of the rounds that clients mark as their session's final one."""
        last = {round_.session: index for index, round_ in enumerate(self.rounds)}
        return {index for session, index in last.items() if self.sessions[session].ends}
