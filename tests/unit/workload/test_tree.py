"""The tree of tokens: shared prefixes give shared blocks at every block size, and no others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.workload.tree import ROOT, TokenSegment, Tree


def test_branches_share_what_lies_before_their_fork() -> None:
    tree = Tree()
    trunk = tree.fork()
    left, right = tree.fork(trunk, 100), tree.fork(trunk, 40)
    assert tree.shared(left, trunk, 1000) == 100
    assert tree.shared(left, right, 1000) == 40
    assert tree.shared(left, right, 30) == 30
    assert tree.shared(left, tree.fork(), 1000) == 0


def test_a_path_starts_at_the_root_and_ends_at_the_length() -> None:
    tree = Tree()
    trunk = tree.fork()
    twig = tree.fork(tree.fork(trunk, 10), 30)
    assert tree.path(twig, 50) == [
        TokenSegment(0, 0, 10),
        TokenSegment(1, 10, 30),
        TokenSegment(2, 30, 50),
    ]
    assert tree.path(twig, 20) == [TokenSegment(0, 0, 10), TokenSegment(1, 10, 20)]
    assert tree.path(twig, 0) == []


def test_a_fork_before_the_start_of_its_parent_belongs_to_the_grandparent() -> None:
    tree = Tree()
    trunk = tree.fork()
    branch = tree.fork(trunk, 50)
    assert tree.parent(tree.fork(branch, 20)) == (trunk, 20)


@pytest.mark.parametrize(("parent", "start"), [(5, 0), (0, -1), (ROOT, 3)])
def test_a_fork_off_the_path_is_rejected(parent: int, start: int) -> None:
    tree = Tree()
    tree.fork()
    with pytest.raises(ValueError, match="no token"):
        tree.fork(parent, start)


@given(
    forks=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 400)), min_size=1, max_size=12),
    tokens=st.integers(0, 500),
    size=st.sampled_from([1, 16, 64, 100]),
    data=st.data(),
)
def test_shared_blocks_are_exactly_the_full_blocks_of_the_shared_tokens(
    forks: list[tuple[int, int]], tokens: int, size: int, data: st.DataObject
) -> None:
    tree = Tree()
    tree.fork()
    for parent, start in forks:
        tree.fork(parent % len(tree), start)
    one = data.draw(st.integers(0, len(tree) - 1))
    other = data.draw(st.integers(0, len(tree) - 1))
    left, right = tree.blocks(one, tokens, size), tree.blocks(other, tokens, size)
    assert len(left) == len(right) == tokens // size
    assert len(set(left.tolist())) == len(left)
    same = (left == right).tolist()
    shared = tree.shared(one, other, tokens) // size
    assert same == [True] * shared + [False] * (len(left) - shared)


def test_block_hashes_are_the_same_everywhere() -> None:
    tree = Tree()
    branch = tree.fork(tree.fork(), 16)
    assert tree.blocks(branch, 40, 16).tolist() == [1613305665607747243, 15486422722966161208]
