"""The runs of a prompt tree as the page shows them."""

import numpy as np
from support.prompt_trees import BLOCK, tree_of

from kvmesh.bus.messages import RankKey
from kvmesh.dashboard.state.prefixes.holders import UNKNOWN, holders, questions
from kvmesh.dashboard.state.prefixes.nodes import (
    MOST_NAME,
    holder_rows,
    holders_text,
    nodes,
    run_state,
    short_name,
    slices,
)
from kvmesh.router.scoring.overlaps import Overlaps

COLOURS = {state: state for state in ("held", "partly", "lost", "unknown")}


def overlaps(*rows: tuple[int, int, int, int]) -> Overlaps:
    """The overlaps of ranks w-0, w-1, …: blocks by tier."""
    ranks = [RankKey(f"w-{number}", 0) for number in range(len(rows))]
    packed = np.array([(at, *row) for at, row in enumerate(rows)], "<u4").tobytes()
    return Overlaps(ranks, packed)


def test_a_node_tells_its_sessions_share_and_holders() -> None:
    tree = tree_of(("a", "sysA"), ("b", "sysB"))
    found = {number: overlaps((3, 1, 0, 0), (1, 0, 0, 0)) for number in questions(tree)}
    (node,) = nodes(tree, holders(tree, found))
    assert (node["label"], node["tokens"], node["requests"]) == ("2 sessions", "48", "2")
    assert (node["share"], node["width"]) == ("75.0%", "75.0%")
    assert (node["state"], node["holders"]) == ("held", "engine 2")
    assert sorted((c["label"], c["holders"]) for c in node["children"]) == [
        ("a", "host 1"),
        ("b", "host 1"),
    ]


def test_states_are_told_in_words() -> None:
    tree = tree_of(("a", "abcd"))
    (run,) = tree.roots
    texts = {}
    for rows in ([(4, 0, 0, 0)], [(1, 1, 0, 0)], []):
        of = holders(tree, {0: overlaps(*rows)})[run.key]
        texts[run_state(run, of)] = holders_text(run, of)
    assert texts == {
        "held": "engine 1",
        "partly": "engine 1, host 1, 50%",
        "lost": "held by nobody",
    }
    assert (run_state(run, UNKNOWN), holders_text(run, UNKNOWN)) == ("unknown", "unknown")


def test_a_thousand_holders_are_counted_and_listed_best_first() -> None:
    tree = tree_of(("a", "abcd"))
    (run,) = tree.roots
    rows = [(1 + (number == 700) * 3, 0, 0, 0) for number in range(1000)]
    of = holders(tree, {0: overlaps(*rows)})[run.key]
    assert holders_text(run, of) == "engine 1,000"
    first, *_ = listed = holder_rows(of, BLOCK)
    assert len(listed) == 1000
    assert (first.holder, first.engine, first.share) == ("w-700#0", 4 * BLOCK, 1.0)


def test_long_names_are_cut_and_control_characters_escaped() -> None:
    tree = tree_of(("n" * 10_000 + "\n", "abcd"), ("\x1b[2J{{ 7*7 }}", "xyz"))
    labels = [node["label"] for node in nodes(tree, {})]
    assert "n" * (MOST_NAME - 1) + "…" in labels
    assert "\\x1b[2J{{ 7*7 }}" in labels
    assert len(short_name("n" * 10_000)) == MOST_NAME


def test_the_slices_of_a_run_are_no_larger_than_the_run() -> None:
    tree = tree_of(("a", "sysA"), ("b", "sysBB"))
    (slice_,) = slices(tree, holders(tree, {}), COLOURS)
    assert slice_["value"] == tree.tokens
    assert sum(child["value"] for child in slice_["children"]) == 3 * BLOCK
    assert slice_["itemStyle"] == {"color": "unknown"}
