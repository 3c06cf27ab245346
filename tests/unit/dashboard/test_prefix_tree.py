"""The tree of prompts and its holders: each prompt's blocks are on its path, and are counted."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.prompt_trees import BLOCK, tree_of

from kvmesh.bus.messages import RankKey
from kvmesh.dashboard.state.prefixes import holders as prefix_holders
from kvmesh.dashboard.state.prefixes import tree as prefix_tree
from kvmesh.dashboard.state.prefixes.holders import holders, questions
from kvmesh.dashboard.state.prefixes.tree import PrefixRun
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.scoring.overlaps import Overlaps


def paths(run: PrefixRun, before: tuple[PrefixRun, ...] = ()) -> list[tuple[PrefixRun, ...]]:
    path = (*before, run)
    return [path, *(each for child in run.children for each in paths(child, path))]


def test_sessions_that_share_a_prefix_share_one_run() -> None:
    tree = tree_of(("a", "sysA"), ("b", "sysBB"), ("a", "sysAA"))
    (root,) = tree.roots
    assert (root.blocks, len(root.prompts), root.requests) == (3, 2, 3)
    assert sorted((c.first, c.blocks, c.requests) for c in root.children) == [(3, 2, 1), (3, 2, 2)]
    assert root.passed == 9
    assert tree.tokens == BLOCK * 14
    assert tree.shared_tokens() == BLOCK * 9
    assert tree.share(root) == 9 / 14
    assert root.last_used == 2


def test_prompts_of_other_models_and_without_blocks_do_not_count() -> None:
    assert tree_of(("a", "sys"), model="another").roots == []
    assert tree_of(("a", "")).roots == []


def test_requests_without_sessions_are_prompts_of_their_own() -> None:
    (root,) = tree_of(("", "xa"), ("", "xb")).roots
    assert len(root.prompts) == 2


def test_many_siblings_become_one_run_with_their_sums() -> None:
    letters = [chr(number) for number in range(1000, 1060)]
    tree = tree_of(*((letter, "sys" + letter) for letter in letters))
    (root,) = tree.roots
    rest = root.children[-1]
    assert len(root.children) == prefix_tree.MOST_CHILDREN + 1
    assert (rest.merged, rest.blocks, rest.requests) == (40, 40, 40)
    assert sum(child.passed for child in root.children) == 60


def test_holders_of_a_run_are_those_of_its_blocks_by_tier() -> None:
    tree = tree_of(("a", "sysA"), ("b", "sysBB"))
    asked = questions(tree)
    assert {len(hashes) // HASH_BYTES for hashes in asked.values()} == {4, 5}
    ranks = [RankKey("w-0-1", 0), RankKey("kv-0-1", 0)]
    a, b = (next(n for n, p in enumerate(tree.prompts) if p.session == s) for s in "ab")
    rows = {
        a: [[0, 2, 1, 0, 0], [1, 0, 3, 0, 1]],
        b: [[0, 2, 1, 0, 0]],
    }
    found = {n: Overlaps(ranks, np.array(r, "<u4").tobytes()) for n, r in rows.items()}
    held = holders(tree, found)
    (root,) = tree.roots
    of_root = {holder.instance: holder[2:] for holder in held[root.key].rows()}
    assert of_root["w-0-1"] == (2, 1, 0, 0)
    assert of_root.get("kv-0-1", (0, 3, 0, 0)) == (0, 3, 0, 0)  # the index told it of one prompt
    for child in root.children:
        of = held[child.key]
        if a in child.prompts:
            assert [(h.instance, h.remote) for h in of.rows()] == [("kv-0-1", 1)]
            assert (of.held, of.by_tier) == (1.0, [0, 0, 0, 1])
        else:
            assert (of.rows(), of.held) == ([], 0.0)


def test_runs_beyond_the_bound_of_a_round_are_unknown() -> None:
    tree = tree_of(("a", "A"), ("b", "B" * 10))
    bound, prefix_holders.MOST_BYTES = prefix_holders.MOST_BYTES, 8 * HASH_BYTES
    try:
        asked = questions(tree)
    finally:
        prefix_holders.MOST_BYTES = bound
    assert [tree.prompts[number].session for number in asked] == ["a"]
    held = holders(tree, {number: Overlaps([], b"") for number in asked})
    assert {held[run.key].held for run in tree.roots} == {None, 0.0}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.text("xy", max_size=6)), max_size=20))
def test_every_prompt_is_on_its_path_and_counted(requests: list[tuple[str, str]]) -> None:
    tree = tree_of(*requests)
    latest = dict(requests)
    for path in (each for root in tree.roots for each in paths(root)):
        run = path[-1]
        assert not run.merged
        sessions = {tree.prompts[number].session for number in run.prompts}
        text = latest[next(iter(sessions))][: run.end]
        assert sum(each.blocks for each in path) == run.end == len(text)
        assert sessions == {s for s, t in latest.items() if t.startswith(text)}
        begun = [t for _, t in requests if t.startswith(text[: run.first + 1])]
        assert run.requests == len(begun)
        shared = (_common(t, text) - run.first for t in begun)
        assert run.passed == sum(shared)
    ends = {latest[p.session]: 0 for p in tree.prompts}
    assert sum(run.blocks for run in tree.runs()) == len(
        {t[:n] for t in ends for n in range(1, len(t) + 1)}
    )
    for number, hashes in questions(tree).items():
        assert tree.prompts[number].hashes.startswith(hashes)
    known = holders(tree, {number: Overlaps([], b"") for number in questions(tree)})
    assert all(known[run.key].held == 0 for run in tree.runs())


def _common(one: str, other: str) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
