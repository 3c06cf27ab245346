"""A workload with more or fewer sessions at the same pace, drawn from those of another one.

Families of sessions are drawn with replacement (the bootstrap of Efron 1979), so several seeds show
how much depends on which sessions happened to come.
"""

from random import Random

from msgspec.structs import replace

from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.generate.families import (
    branch_uses,
    families_of,
    family_start,
    shared_ends,
)
from kvmesh.workload.model import Session, Workload
from kvmesh.workload.tree import ROOT, Tree

JITTER_S = 30.0  # copies of one family do not start at once
MOST_ROUNDS = 5_000_000


class ScalingError(WorkloadError):
    """A factor with which nothing is left, or too many requests."""


def scale_sessions(workload: Workload, factor: float, seed: int) -> Workload:
    """A workload of `factor` times as many sessions, with the times between their requests.

    Prefixes that several families share stay shared; the rest of each copy is its own. Raises
    ScalingError.
    """
    families = families_of(workload)
    count = round(len(families) * factor)
    if not count:
        raise ScalingError(f"no session is left of {len(families)} at a scale of {factor:g}")
    if len(workload) * factor > MOST_ROUNDS:
        raise ScalingError(f"more than {MOST_ROUNDS:,} requests at a scale of {factor:g}")
    rng = Random(seed)
    starts = [family_start(workload, family) for family in families]
    span = max(starts, default=0.0)
    shared = shared_ends(branch_uses(workload, families))
    writer = _ScaledWriter(workload, shared)
    draws = []
    for copy in range(count):
        family = copy if copy < len(families) and factor >= 1 and not seed else None
        drawn = rng.randrange(len(families)) if family is None else family
        at = starts[drawn] + rng.uniform(-JITTER_S, JITTER_S) * (copy >= len(families) or seed > 0)
        draws.append((min(max(at, 0.0), span), drawn))
    for at, drawn in sorted(draws):
        writer.add(families[drawn], at - starts[drawn])
    return writer.scaled


class _ScaledWriter:
    """Adds copies of families to a new workload with the branches of the old one and new ones."""

    def __init__(self, workload: Workload, shared: dict[int, int]) -> None:
        self._of = workload
        self._shared = shared
        tree = Tree()
        for branch in range(len(workload.tree)):
            tree.fork(*workload.tree.parent(branch))
        self.scaled = Workload(tree=tree, sessions=[], rounds=[], block_size=workload.block_size)

    def add(self, family: list[int], later_s: float) -> None:
        """Add a copy of a family whose first rounds start `later_s` seconds later."""
        scaled = self.scaled
        branches: dict[int, int] = {ROOT: ROOT}
        sessions: dict[int, int] = {}
        rounds: dict[int, int] = {}
        for index in family:
            round_ = self._of.rounds[index]
            rounds[index] = len(scaled.rounds)
            at = round_.at_s if round_.after else max(round_.at_s + later_s, 0.0)
            rendered = round_.rendered
            if rendered is not None:
                rendered = self._branch(rendered[0], branches), rendered[1]
            scaled.rounds.append(
                replace(
                    round_,
                    session=self._session(round_.session, sessions),
                    branch=self._branch(round_.branch, branches),
                    output_branch=self._branch(round_.output_branch, branches),
                    rendered=rendered,
                    after=tuple(rounds[before] for before in round_.after),
                    at_s=at,
                )
            )

    def _session(self, number: int, copies: dict[int, int]) -> int:
        chain = [number]
        while (parent := self._of.sessions[chain[-1]].parent) is not None:
            chain.append(parent)
        for each in reversed(chain):
            if each not in copies:
                session: Session = self._of.sessions[each]
                parent = copies[session.parent] if session.parent is not None else None
                copies[each] = len(self.scaled.sessions)
                name = f"{session.name}.{copies[each]}"
                self.scaled.sessions.append(replace(session, name=name, parent=parent))
        return copies[number]

    def _branch(self, branch: int, copies: dict[int, int]) -> int:
        """The copy of a branch; its first part stays the old one where families share it."""
        tree, shared = self.scaled.tree, self._shared
        missing = []
        at = branch
        while at not in copies:
            missing.append(at)
            at = self._of.tree.parent(at)[0]
        for each in reversed(missing):
            parent, start = self._of.tree.parent(each)
            if shared.get(each, start) > start:
                copies[each] = tree.fork(each, shared[each])
            elif parent != ROOT and start <= shared.get(parent, -1):
                copies[each] = tree.fork(parent, start)
            else:
                copies[each] = tree.fork(copies[parent], start)
        return copies[branch]
