"""The one internal form of a workload, whatever file or generator it came from.

A workload is a list of *rounds* (one request each), grouped into *sessions*, over one *tree* of
tokens. It holds no text and no token ids: only which prompts share which prefix, how long prompts
and answers are, and when each request may start. docs/workloads.md explains it with examples.
"""

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from kvmesh.workload.tree import Tree

# No prompt has so many tokens, and no wait takes so many seconds: beyond it, a trace is in error.
LIMIT = 100_000_000
Tokens = Annotated[int, Meta(ge=0, le=LIMIT)]
SomeTokens = Annotated[int, Meta(ge=1, le=LIMIT)]
Seconds = Annotated[float, Meta(ge=0, le=LIMIT)]
Milliseconds = Annotated[float, Meta(ge=0, le=LIMIT * 1e3)]
Priority = Annotated[int, Meta(ge=-LIMIT, le=LIMIT)]


class Round(Struct, frozen=True, kw_only=True):
    """One request.

    It starts `at_s` seconds after the start of the workload or, when it waits for others (`after`,
    indices into the workload's rounds), `at_s` seconds after the last of them has ended.

    The prompt is `(branch, input_tokens)`; after generation the engine holds `(answer, input_tokens
    + output_tokens)`. `answer == branch` means that later prompts contain the answer as it was
    generated. `wait` says what the client did before this round ("human", a tool's name).
    `abort_after` is the number of answer tokens after which the client leaves.
    """

    session: int
    branch: int
    output_branch: int
    input_tokens: SomeTokens
    output_tokens: Tokens
    at_s: Seconds = 0.0
    after: tuple[int, ...] = ()
    wait: str = ""
    priority: Priority = 0
    thinking_tokens: Tokens = 0
    abort_after: SomeTokens | None = None


class Session(Struct, frozen=True, kw_only=True):
    """One agent's chain of rounds. `parent` is the session that started it.

    With `ends`, its client says with the last round that it is over.
    """

    name: str
    kind: str = ""
    parent: int | None = None
    ends: bool = False


class Workload(Struct, kw_only=True):
    """Rounds in an order in which each comes after all that it waits for.

    `block_size` is the resolution in tokens to which sharing is known; 1 means exactly.
    """

    tree: Tree
    sessions: list[Session]
    rounds: list[Round]
    block_size: int = 1

    def __len__(self) -> int:
        return len(self.rounds)

    def first(self, count: int | None) -> "Workload":
        """The first `count` rounds; what they wait for is among them."""
        if count is None or count >= len(self.rounds):
            return self
        return Workload(
            tree=self.tree,
            sessions=self.sessions,
            rounds=self.rounds[:count],
            block_size=self.block_size,
        )

    def by_session(self) -> Iterator[list[int]]:
        """The indices of each session's rounds, in order."""
        members: list[list[int]] = [[] for _ in self.sessions]
        for index, round_ in enumerate(self.rounds):
            members[round_.session].append(index)
        return iter(members)

    def final_rounds(self) -> set[int]:
        """The last round of each session whose client says that it is over."""
        chains = zip(self.sessions, self.by_session(), strict=True)
        return {members[-1] for session, members in chains if session.ends and members}
