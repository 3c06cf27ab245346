"""Synthesizes workloads with the structure of a recorded one.

A family of sessions (a session with its subagents) is drawn as a whole, with the requests, the
requests that each waits for, and the places where its prompts continue, fork or are rewritten.
Lengths, waits and times between arrivals are exchanged among similar ones. Draws are without
replacement, so that a distribution of the source is met, not approached.
"""

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.generate.families import branch_uses, families_of, shared_ends
from kvmesh.workload.generate.segments import CORE, OUTPUT, SegmentedTree, SegmentGroups
from kvmesh.workload.generate.selection import FamilySelection
from kvmesh.workload.generate.timing import FamilyArrivals, Pauses
from kvmesh.workload.model import LIMIT, Round, Session, SomeTokens, Workload
from kvmesh.workload.reading.window import TOKEN_S
from kvmesh.workload.tree import ROOT, Tree

MOST_REQUESTS = 5_000_000
LEAST_SHARE = 0.01  # of the seed's requests that `max_isl` has to leave
# A prefix that at least so many prompts of a tenth of all families begin with is one prefix however
# many requests there are: to compute it anew in each batch would cost less than 1/COMMON of them.
COMMON = 200
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]


class SynthesisError(WorkloadError):
    """A seed that cannot be used, or options that no prompt satisfies."""


class SynthesisOptions(Struct, frozen=True, kw_only=True):
    """Changes to the seed.

    The multipliers scale what sessions share, the rest of their prompts, and outputs;
    `prefix_root_multiplier` is the number of copies of what sessions share, which share nothing;
    arrivals are `speedup_ratio` times faster; a session ends before a prompt of more than
    `max_isl` tokens.
    """

    num_requests: Annotated[int, Meta(ge=1, le=MOST_REQUESTS)]
    prefix_len_multiplier: Factor = 1.0
    prefix_root_multiplier: Annotated[int, Meta(ge=1, le=MOST_REQUESTS)] = 1
    prompt_len_multiplier: Factor = 1.0
    osl_multiplier: Factor = 1.0
    speedup_ratio: Factor = 1.0
    max_isl: SomeTokens = LIMIT
    seed: int = 0


class Synthesizer:
    """Draws a workload like a seed workload, determined by the options.

    More requests than the seed's are further batches: each has all families with other lengths and
    waits, and its own copy of the prefixes that families share, except for common ones. So the
    ideal share stays. Fewer requests are a part of the families.
    """

    def __init__(self, workload: Workload, options: SynthesisOptions) -> None:
        if not workload.rounds:
            raise SynthesisError("the seed trace has no requests")
        self._of = workload
        self._options = options
        self._rng = np.random.default_rng(options.seed % 2**64)
        self._families = families_of(workload)
        uses = branch_uses(workload, self._families)
        self._segments = SegmentedTree(workload)
        self._common = _common_cuts(uses, self._segments, len(self._families))
        ends = {branch: int(self._segments.token[cut]) for branch, cut in self._common.items()}
        self._groups = SegmentGroups(workload, self._segments, shared_ends(uses), ends)
        self._uses = uses
        self._selection: FamilySelection | None = None
        self._pauses = Pauses(workload, self._families)
        self._arrivals = FamilyArrivals(workload, self._families, options.speedup_ratio)
        self._tree = Tree()
        self._sessions: list[Session] = []
        self._rounds: list[Round] = []
        self._starts: list[float] = []
        self._ends: list[float] = []

    def workload(self) -> Workload:
        """`num_requests` requests in the order in which they would start. Raises SynthesisError."""
        options = self._options
        commons: list[dict[int, int]] = [{} for _ in range(self._copies())]
        every = list(range(len(self._families)))
        batch, sparse = 0, False
        while len(self._rounds) < options.num_requests:
            before = len(self._rounds)
            missing = options.num_requests - before
            chosen = every if sparse or missing >= len(self._of) else self._chosen(missing)
            self._add_batch(batch, chosen, commons)
            batch += 1
            if len(self._rounds) - before < LEAST_SHARE * min(missing, len(self._of)):
                if chosen == every:
                    raise SynthesisError(
                        f"less than {LEAST_SHARE:.0%} of the seed's requests have prompts of at "
                        f"most {options.max_isl:,} tokens and follow such requests only"
                    )
                sparse = True
        return self._assembled().first(options.num_requests)

    def _copies(self) -> int:
        return min(self._options.prefix_root_multiplier, len(self._families))

    def _chosen(self, requests: int) -> list[int]:
        if self._selection is None:
            self._selection = FamilySelection(self._of, self._families, self._uses)
        return self._selection.choose(requests, self._rng)

    def _add_batch(self, batch: int, chosen: list[int], commons: list[dict[int, int]]) -> None:
        layout = _Layout(self._of, self._segments, self._lengths())
        copies = [_TreeCopy(self._of, self._tree, layout, self._common, each) for each in commons]
        pauses = self._pauses.exchanged(self._rng)
        starts = self._arrivals.starts(batch, chosen, self._rng)
        for number, start in zip(chosen, starts, strict=True):
            copy = copies[int(self._rng.integers(len(copies)))]
            self._add_family(self._families[number], start, pauses, copy)

    def _lengths(self) -> list[int]:
        """Lengths of all segments for one batch, in tokens."""
        options, groups = self._options, self._groups
        lengths = groups.exchanged(self._rng)
        factors = np.full(len(lengths), options.prompt_len_multiplier)
        factors[groups.role == CORE] = options.prefix_len_multiplier
        factors[groups.role == OUTPUT] = options.osl_multiplier
        scaled: list[int] = np.rint(np.minimum(lengths * factors, LIMIT)).astype(np.int64).tolist()
        return scaled

    def _add_family(
        self, family: list[int], start_s: float, givers: list[int], copy: "_TreeCopy"
    ) -> None:
        sessions: dict[int, int] = {}
        waited: dict[int, tuple[int, ...]] = {}  # new rounds that stand for each one
        ended: set[int] = set()
        last: dict[int, float] = {}
        latest = start_s
        for index in family:
            round_ = self._of.rounds[index]
            after = tuple(sorted({new for old in round_.after for new in waited[old]}))
            prompt = copy.layout.places[self._segments.prompt[index]]
            if prompt > self._options.max_isl or self._has_ended(round_.session, ended):
                ended.add(round_.session)
                waited[index] = after
                continue
            giver = self._of.rounds[givers[index]]
            if after:
                at_s = giver.at_s
                begin = at_s + max(self._ends[new] for new in after)
            else:
                gap = 0.0 if round_.after else self._pauses.gaps[givers[index]]
                since = last.get(round_.session, latest)
                at_s = begin = since + gap / self._options.speedup_ratio
            last[round_.session] = latest = begin
            waited[index] = (len(self._rounds),)
            made = replace(
                self._resized(index, prompt, copy),
                session=self._session(round_.session, sessions),
                after=after,
                at_s=min(at_s, LIMIT),
                wait=round_.wait if after else "",
                wait_class=giver.wait_class if after else "",
                approval_s=giver.approval_s if after else 0.0,
            )
            self._rounds.append(made)
            self._starts.append(begin)
            self._ends.append(begin + made.output_tokens * TOKEN_S)

    def _has_ended(self, session: int, ended: set[int]) -> bool:
        """True if the session or one that it descends from has ended."""
        at: int | None = session
        while at is not None and at not in ended:
            at = self._of.sessions[at].parent
        return at is not None

    def _resized(self, index: int, prompt: int, copy: "_TreeCopy") -> Round:
        """A round with the lengths of a layout, on the branches of a copy."""
        round_, segments = self._of.rounds[index], self._segments
        places = copy.layout.places
        prompt = max(prompt, 1)
        generated = places[segments.output[index]] - prompt
        output = min(max(generated, 1), LIMIT) if round_.output_tokens else 0
        per_token = output / max(round_.output_tokens, 1)
        abort, rendered = round_.abort_after, round_.rendered
        if abort is not None:
            abort = max(1, round(abort * per_token))
        if rendered is not None:
            rendered = copy.branch(rendered[0]), max(1, places[segments.rendered[index]])
        return replace(
            round_,
            branch=copy.branch(round_.branch),
            output_branch=copy.branch(round_.output_branch),
            input_tokens=prompt,
            output_tokens=output,
            thinking_tokens=min(output, round(round_.thinking_tokens * per_token)),
            abort_after=abort,
            rendered=rendered,
            marks=tuple(
                (max(1, places[cut]), ttl)
                for cut, (_, ttl) in zip(segments.marks[index], round_.marks, strict=True)
            ),
        )

    def _session(self, number: int, copies: dict[int, int]) -> int:
        """The new session for one of this family, its ancestors first."""
        missing: list[int] = []
        at: int | None = number
        while at is not None and at not in copies:
            missing.append(at)
            at = self._of.sessions[at].parent
        for each in reversed(missing):
            session: Session = self._of.sessions[each]
            parent = None if session.parent is None else copies[session.parent]
            copies[each] = len(self._sessions)
            self._sessions.append(replace(session, name=f"s{copies[each]}", parent=parent))
        return copies[number]

    def _assembled(self) -> Workload:
        """The rounds in the order of their planned starts."""
        order = np.argsort(self._starts, kind="stable").tolist()
        place = {draft: at for at, draft in enumerate(order)}
        rounds = [self._rounds[draft] for draft in order]
        return Workload(
            tree=self._tree,
            sessions=self._sessions,
            rounds=[
                replace(round_, after=tuple(sorted(place[draft] for draft in round_.after)))
                for round_ in rounds
            ],
            block_size=self._of.block_size,
        )


class _Layout:
    """The places of all cuts and forks, in tokens, if segments have other lengths."""

    def __init__(self, workload: Workload, segments: SegmentedTree, lengths: list[int]) -> None:
        size = workload.block_size
        aligned: list[bool] = (segments.token % size == 0).tolist()
        whole = {fork for fork in segments.fork if fork != ROOT and aligned[fork]}
        self.places = [0] * len(lengths)
        self.forks: list[int] = []
        for branch, fork in enumerate(segments.fork):
            at = 0 if fork == ROOT else self.places[fork]
            self.forks.append(at)
            for cut in range(segments.first[branch], segments.end[branch]):
                before, at = at, at + lengths[cut]
                if cut in whole:  # prompts share whole blocks
                    at = (at + size // 2) // size * size
                    at += size * (at < before)
                self.places[cut] = at


class _TreeCopy:
    """A copy of a workload's branches in a new tree, with the lengths of a layout.

    `common` maps branches to the cuts at which their common prefixes end; `commons` holds the
    copies of these, which outlast this one.
    """

    def __init__(
        self,
        workload: Workload,
        tree: Tree,
        layout: _Layout,
        common: dict[int, int],
        commons: dict[int, int],
    ) -> None:
        self.layout = layout
        self._of = workload.tree
        self._tree = tree
        self._common = common
        self._commons = commons
        self._made: dict[int, int] = {ROOT: ROOT}

    def branch(self, branch: int) -> int:
        """The copy of a branch."""
        missing: list[int] = []
        while branch not in self._made:
            missing.append(branch)
            branch = self._of.parents[branch]
        for branch in reversed(missing):
            self._made[branch] = self._copied(branch)
        return self._made[branch]

    def _copied(self, branch: int) -> int:
        layout, commons = self.layout, self._commons
        parent, fork = self._of.parents[branch], layout.forks[branch]
        if branch in self._common:
            if branch not in commons:
                base = ROOT if parent == ROOT else commons[parent]
                commons[branch] = self._tree.fork(base, fork)
            return self._tree.fork(commons[branch], layout.places[self._common[branch]])
        if parent in self._common and fork <= layout.places[self._common[parent]]:
            return self._tree.fork(commons[parent], fork)
        return self._tree.fork(self._made[parent], fork)


def _common_cuts(
    uses: dict[int, list[tuple[int, int]]], segments: SegmentedTree, families: int
) -> dict[int, int]:
    """The cut on each branch up to which it is common to many prompts of many families."""
    least = max(2, families // 10)
    cuts: dict[int, int] = {}
    for branch, each in uses.items():
        if len(each) < least:
            continue
        for cut in range(segments.first[branch], segments.end[branch]):
            if segments.token[cut] > each[least - 1][0] or segments.prompts[cut] < COMMON:
                break
            cuts[branch] = cut
    return cuts
