"""What nodes tell each other that they compute, so that a prefix is computed once in the mesh.

A claim names a prompt's blocks by some of their digests, each of which stands for all before it.
Two nodes that claim the same without having heard of each other both know it in the end, and the
one whose name is less goes first.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.kvbm.core.transfers.in_progress import Computer
from kvmesh.kvbm.core.transfers.prompt_blocks import PromptBlocks

MOST_MARKS = 256
MOST_HEARD = 1 << 17
MOST_REPEATED = 256


class ClaimMessage(NamedTuple):
    """To be told to all nodes; no `marks` end what was told under the number before."""

    model: str
    number: int
    marks: list[bytes]


@dataclass(slots=True)
class ComputeClaim:
    """The blocks of a prompt from `first` on, as they were told."""

    telling: ClaimMessage
    first: int
    told: float


class Claims:
    """What requests of this node compute, in the words of the mesh; counts for `lasts_s`."""

    def __init__(self, lasts_s: float) -> None:
        self.lasts_s = lasts_s
        self._last = 0
        self._by: dict[Computer, ComputeClaim] = {}
        self._tellings: list[ClaimMessage] = []

    def __len__(self) -> int:
        return len(self._by)

    def first(self, computer: Computer | None) -> int | None:
        """The first block of its prompt that a request has claimed."""
        claim = self._by.get(computer) if computer is not None else None
        return claim.first if claim is not None else None

    def make(self, computer: Computer, prompt: PromptBlocks, first: int, now: float) -> None:
        """A request computes the rest of its prompt from `first` on, if there is any."""
        known = self._by.get(computer)
        if first >= len(prompt):
            self.end(computer)
        elif known is None or first < known.first:
            self._last += known is None
            number = known.telling.number if known is not None else self._last
            telling = ClaimMessage(prompt.space.model, number, _marks(prompt, first))
            self._by[computer] = ComputeClaim(telling, first, now)
            self._tellings.append(telling)

    def end(self, computer: Computer) -> None:
        """It computes nothing more."""
        claim = self._by.pop(computer, None)
        if claim is not None:
            self._tellings.append(claim.telling._replace(marks=[]))

    def renew(self, computing: Iterable[Computer], now: float) -> None:
        """Tell again in time what still counts; the rest lapses everywhere."""
        known = set(computing)
        for computer, claim in list(self._by.items()):
            if computer in known and now - claim.told > self.lasts_s / 2:
                claim.told = now
                self._tellings.append(claim.telling)
            elif now - claim.told > self.lasts_s:
                del self._by[computer]

    def under_way(self, model: str) -> list[ClaimMessage]:
        """What has been told of a model and still holds, for whoever could not hear it."""
        told = [claim.telling for claim in self._by.values() if claim.telling.model == model]
        return told[-MOST_REPEATED:]

    def take(self) -> list[ClaimMessage]:
        """What is to be told."""
        taken, self._tellings = self._tellings, []
        return taken


class PeerSource(NamedTuple):
    """Another node has, or computes, the blocks of a prompt up to `end`."""

    owner: str
    end: int


@dataclass(slots=True, eq=False)
class _Heard:
    owner: str
    number: int
    marks: list[bytes]
    until: float


class PeerClaims:
    """What other nodes have claimed, as long as it counts."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, int], _Heard] = {}
        self._of: dict[bytes, list[_Heard]] = {}
        self._marks = 0

    def __len__(self) -> int:
        return len(self._heard)

    def hear(self, owner: str, number: int, marks: list[bytes], until: float) -> None:
        """A node claims these in place of what it has claimed before under this number."""
        self._forget(owner, number)
        if not marks:
            return
        heard = self._heard[owner, number] = _Heard(owner, number, marks[:MOST_MARKS], until)
        for mark in heard.marks:
            self._of.setdefault(mark, []).append(heard)
        self._marks += len(heard.marks)
        while self._marks > MOST_HEARD:
            self._forget(*next(iter(self._heard)))

    def find(self, prompt: PromptBlocks, first: int) -> PeerSource | None:
        """Who is to be waited for if block `first` is missing, and how far that goes."""
        if not self._of:
            return None
        digests = prompt.digests[first:]
        claims = next((self._of[digest] for digest in digests if digest in self._of), None)
        if claims is None:
            return None
        chosen = min(claims, key=lambda heard: heard.owner)
        marks = set(chosen.marks)
        count = next(n for n in range(len(digests), 0, -1) if digests[n - 1] in marks)
        return PeerSource(chosen.owner, first + count)

    def drop(self, owner: str, prompt: PromptBlocks, first: int) -> None:
        """Nothing more of a prompt comes from this node."""
        for digest in prompt.digests[first:]:
            for heard in [h for h in self._of.get(digest, ()) if h.owner == owner]:
                self._forget(heard.owner, heard.number)

    def leave(self, owner: str) -> None:
        """The node is gone."""
        for heard in [h for h in self._heard.values() if h.owner == owner]:
            self._forget(owner, heard.number)

    def expire(self, now: float) -> None:
        for heard in [h for h in self._heard.values() if h.until < now]:
            self._forget(heard.owner, heard.number)

    def _forget(self, owner: str, number: int) -> None:
        heard = self._heard.pop((owner, number), None)
        if heard is None:
            return
        self._marks -= len(heard.marks)
        for mark in heard.marks:
            claims = self._of[mark]
            claims.remove(heard)
            if not claims:
                del self._of[mark]


def _marks(prompt: PromptBlocks, first: int) -> list[bytes]:
    """Digests of the rest of a prompt, evenly apart, the last one among them."""
    step = -(-(len(prompt) - first) // MOST_MARKS)
    return [prompt.digests[i] for i in range(len(prompt) - 1, first - 1, -step)][::-1]
