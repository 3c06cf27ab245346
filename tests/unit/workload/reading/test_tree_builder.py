"""Trees from block ids: runs of blocks give the same branches as blocks one by one."""

from random import Random

import pytest

from kvmesh.workload.reading.tree_builder import TreeBuilder
from kvmesh.workload.tree import ROOT, Tree


class OneByOne:
    """The plain twin: a look-up per block."""

    def __init__(self, tree: Tree, size: int) -> None:
        self.tree, self.size = tree, size
        self.known: dict[tuple[int, int] | int, tuple[int, int, int]] = {}
        self.tips: dict[int, int] = {}
        self.conflicts: list[int] = []

    def add(self, ids: list[int]) -> int:
        branch = before = ROOT
        for depth, block in enumerate(ids):
            key: tuple[int, int] | int = block
            known = self.known.get(key)
            if known is not None and known[1:] != (depth, before):
                self.conflicts.append(block)
                key = (before, block)
                known = self.known.get(key)
            if known is None:
                if branch == ROOT or self.tips[branch] != depth:
                    branch = self.tree.fork(branch, depth * self.size)
                self.tips[branch] = depth + 1
                self.known[key] = (branch, depth, before)
            else:
                branch = known[0]
            before = block
        return branch if branch != ROOT else self.tree.fork()


def prompts(rng: Random, conflicts: bool) -> list[list[int]]:
    """Prompts that continue, fork, repeat or shorten earlier ones."""
    made: list[list[int]] = [[]]
    fresh = iter(range(10_000))
    for _ in range(120):
        base = rng.choice(made)
        kept = base[: rng.randrange(len(base) + 1)]
        prompt = kept + [next(fresh) for _ in range(rng.randrange(6))]
        if conflicts and rng.random() < 0.05 and prompt:
            prompt[rng.randrange(len(prompt))] = rng.choice(rng.choice(made) or [3])
        made.append(prompt)
    return made


@pytest.mark.parametrize("conflicts", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_runs_give_the_branches_of_single_blocks(seed: int, conflicts: bool) -> None:
    one, other = Tree(), Tree()
    runs, plain = TreeBuilder(one, 16), OneByOne(other, 16)
    for ids in prompts(Random(seed), conflicts):
        assert runs.add(ids) == plain.add(ids)
    assert runs.conflicts == plain.conflicts
    assert [one.parent(b) for b in range(len(one))] == [other.parent(b) for b in range(len(other))]


def test_ids_of_contents_may_stand_anywhere() -> None:
    tree = Tree()
    builder = TreeBuilder(tree, 16)
    first, second = builder.add_contents([1, 2, 1]), builder.add_contents([2, 2, 1])
    third = builder.add_contents([1, 2, 3])
    assert tree.shared(first, second, 48) == 0
    assert tree.shared(first, third, 48) == 32
    assert builder.add_contents([1, 2, 1]) == first
    assert builder.conflicts == []
