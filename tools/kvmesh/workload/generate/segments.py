"""The branches of a workload as segments, whose lengths similar segments can exchange.

Branches are cut where prompts fork, end, are marked or are rendered. A segment lies between two
cuts. The sum over all segments of (length × prompts that contain it) is the workload's prompt
tokens, and the sum of the lengths its distinct ones. An exchange of lengths among segments of about
equally many prompts therefore keeps both, and with them the ideal share.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvmesh.workload.generate.exchange import ExchangeGroups
from kvmesh.workload.model import HUMAN, Round, Workload
from kvmesh.workload.tree import ROOT

Ints = NDArray[np.int64]
RATIO = 1.25  # bound of the ratio of the prompts of segments in a group
_BITS = 32
CORE, OWN, OUTPUT = range(3)


class SegmentedTree:
    """The segments of a workload's tree. Segment k ends at cut k; cuts are numbered by branch.

    `lengths` are tokens, `prompts` the number of prompts that contain the whole segment. `fork`
    maps a branch to the cut that it forks at, ROOT for a root; `first` and `end` to the range of
    its own segments. `prompt`, `output` and `rendered` map a round to the cuts at which its prompt,
    its output and its rendered conversation end, and `marks` to those of its cache marks.
    """

    def __init__(self, workload: Workload) -> None:
        self._tree = workload.tree
        parents, starts = self._tree.parents, self._tree.starts
        rounds = workload.rounds
        keys = [
            parent << _BITS | start
            for parent, start in zip(parents, starts, strict=True)
            if parent != ROOT
        ]
        for round_ in rounds:
            keys.extend(self._ends(round_))
        cuts, places = np.unique(np.array(keys, np.int64), return_inverse=True)
        numbers: Iterator[int] = iter(places.reshape(-1).tolist())
        self.fork = [ROOT if parent == ROOT else next(numbers) for parent in parents]
        self.prompt: list[int] = []
        self.output: list[int] = []
        self.rendered: list[int] = []
        self.marks: list[list[int]] = []
        for round_ in rounds:
            self.prompt.append(next(numbers))
            self.output.append(next(numbers))
            self.rendered.append(ROOT if round_.rendered is None else next(numbers))
            self.marks.append([next(numbers) for _ in round_.marks])
        self.branch: Ints = cuts >> _BITS
        self.token: Ints = cuts & ((1 << _BITS) - 1)
        self.begin: Ints = np.where(
            np.diff(self.branch, prepend=-1) != 0,
            np.frombuffer(starts, np.int64)[self.branch],
            np.roll(self.token, 1),
        )
        self.lengths: Ints = self.token - self.begin
        every = np.arange(len(parents))
        self.first: list[int] = np.searchsorted(self.branch, every, side="left").tolist()
        self.end: list[int] = np.searchsorted(self.branch, every, side="right").tolist()
        self.prompts = self._prompt_counts()

    def _ends(self, round_: Round) -> Iterator[int]:
        yield self._key(round_.branch, round_.input_tokens)
        yield self._key(round_.output_branch, round_.input_tokens + round_.output_tokens)
        if round_.rendered is not None:
            yield self._key(*round_.rendered)
        for tokens, _ in round_.marks:
            yield self._key(round_.branch, tokens)

    def _key(self, branch: int, tokens: int) -> int:
        """The cut at a token on the path along a branch, as one number."""
        parents, starts = self._tree.parents, self._tree.starts
        while tokens <= starts[branch] and parents[branch] != ROOT:
            branch = parents[branch]
        return branch << _BITS | tokens

    def _prompt_counts(self) -> Ints:
        counts = np.bincount(self.prompt, minlength=len(self.lengths)).tolist()
        for branch in reversed(range(len(self.fork))):
            passed = 0
            for cut in reversed(range(self.first[branch], self.end[branch])):
                passed += counts[cut]
                counts[cut] = passed
            if self.fork[branch] != ROOT:
                counts[self.fork[branch]] += passed
        return np.array(counts, np.int64)


class SegmentGroups:
    """Groups of segments that may exchange their lengths, and what each is.

    `shared` maps branches to the token up to which several families use them, `common` to the token
    up to which lengths stay as they are.
    """

    def __init__(
        self,
        workload: Workload,
        segments: SegmentedTree,
        shared: dict[int, int],
        common: dict[int, int],
    ) -> None:
        self._lengths = segments.lengths
        count = len(segments.lengths)
        branches = len(workload.tree)
        ends, fixed = np.zeros(branches, np.int64), np.zeros(branches, np.int64)
        ends[list(shared)], fixed[list(common)] = list(shared.values()), list(common.values())
        self.role: Ints = np.full(count, OWN, np.int64)
        self.role[_output_segments(workload, segments)] = OUTPUT
        self.role[segments.token <= ends[segments.branch]] = CORE
        origin = np.where(self.role == CORE, 0, _origins(workload, segments))
        size = workload.block_size
        uneven = (segments.token % size != 0) * 2 + (segments.begin % size != 0)
        # The rest of a prompt behind the blocks that a later one repeats is part of a block.
        rest = segments.lengths < size
        keys = ((origin * 3 + self.role) * 4 + uneven) * 2 + rest
        level = np.log(np.maximum(segments.prompts, 0.5)) // np.log(RATIO)
        keys[segments.token <= fixed[segments.branch]] = -1
        levels = np.unique(np.stack((keys, level.astype(np.int64))), axis=1, return_inverse=True)[1]
        self._groups = ExchangeGroups(
            np.where(keys < 0, -1, levels.reshape(-1)), segments.lengths.astype(np.float64)
        )

    def exchanged(self, rng: np.random.Generator) -> Ints:
        """Lengths of the segments, exchanged within each group."""
        return self._lengths[self._groups.givers(rng)]


def _output_segments(workload: Workload, segments: SegmentedTree) -> list[int]:
    found: list[int] = []
    for index, round_ in enumerate(workload.rounds):
        end, begin = segments.output[index], segments.prompt[index]
        first = segments.first[round_.output_branch]
        found.extend(range(begin + 1 if begin >= first else first, end + 1))
    return found


def _origins(workload: Workload, segments: SegmentedTree) -> Ints:
    """A number per segment: the kind of its session, and its request's place in the session."""
    origins = np.zeros(len(segments.lengths), np.int64)
    kinds: dict[str, int] = {}
    seen: set[int] = set()
    for index, round_ in enumerate(workload.rounds):
        kind = kinds.setdefault(workload.sessions[round_.session].kind, len(kinds))
        place = 1 if round_.session not in seen else 2 if round_.wait == HUMAN else 3
        seen.add(round_.session)
        for cut in (segments.prompt[index], segments.output[index]):
            if not origins[cut]:
                origins[cut] = kind * 4 + place
    return origins
