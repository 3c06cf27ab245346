"""Analysis against a plain infinite cache."""

from hypothesis import given
from hypothesis import strategies as st
from support.shared_prompts import seed_trace

from kvmesh.workload.analysis.analysis import analyze
from kvmesh.workload.analysis.sharing import ideal_hits
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree


@given(seed=st.integers(0, 1000), size=st.sampled_from([1, 16, 50]))
def test_ideal_hits_are_those_of_a_plain_block_cache(seed: int, size: int) -> None:
    workload = seed_trace(40, seed)
    held: set[int] = set()
    for round_, hit in zip(workload.rounds, ideal_hits(workload, size), strict=True):
        blocks = workload.tree.blocks(round_.branch, round_.input_tokens, size).tolist()
        expected = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
        assert hit == expected * size
        total = round_.input_tokens + round_.output_tokens
        held.update(workload.tree.blocks(round_.output_branch, total, size).tolist())


def test_sharing_is_counted_token_by_token() -> None:
    tree = Tree()
    trunk = tree.fork()
    branches = [tree.fork(trunk, 100) for _ in range(3)]
    rounds = [
        Round(session=0, branch=b, output_branch=b, input_tokens=150, output_tokens=0)
        for b in branches
    ]
    analysis = analyze(Workload(tree=tree, sessions=[Session(name="s")], rounds=rounds))
    assert analysis.unique_tokens == 100 + 3 * 50
    assert analysis.reuse == 450 / 250
    assert analysis.visits["1"] == (150 / 250, 150 / 450)
    assert analysis.visits["2"] == (100 / 250, 300 / 450)
    assert analysis.ideal_hit_share == 200 / 450
    assert analysis.read_write == 200 / 250
