"""Analysis against a plain infinite cache, and synthesis that keeps or changes the structure."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.workload.analysis.analysis import analyze
from kvmesh.workload.analysis.sharing import ideal_hits
from kvmesh.workload.generate.synthesizer import SynthesisError, SynthesisOptions, Synthesizer
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree


def seed_trace(requests: int = 400, seed: int = 3) -> Workload:
    """Prompts of eight families; every other one continues the previous prompt."""
    rng, tree = random.Random(seed), Tree()
    families = [tree.fork() for _ in range(8)]
    rounds: list[Round] = []
    for index in range(requests):
        shared = rng.choice([64, 256, 640])
        tokens = shared + rng.randint(1, 300)
        branch = tree.fork(rng.choice(families), shared)
        if index % 2 and rounds:
            branch = tree.fork(rounds[-1].branch, rounds[-1].input_tokens)
            tokens = rounds[-1].input_tokens + rng.randint(1, 200)
        rounds.append(
            Round(
                session=index,
                branch=branch,
                output_branch=tree.fork(branch, tokens),
                input_tokens=tokens,
                output_tokens=rng.randint(1, 50),
                at_s=index * 0.1,
            )
        )
    sessions = [Session(name=f"r{index}") for index in range(requests)]
    return Workload(tree=tree, sessions=sessions, rounds=rounds, block_size=16)


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


def synthetic(**options: Any) -> Workload:
    given_options = SynthesisOptions(num_requests=1500, block_size=16, **options)
    return Synthesizer(seed_trace(), given_options).workload()


def test_a_synthetic_trace_is_like_its_seed() -> None:
    trace = seed_trace()
    options = SynthesisOptions(num_requests=len(trace), block_size=16)
    seed, like = analyze(trace, 16), analyze(Synthesizer(trace, options).workload(), 16)
    assert like.requests == len(trace)
    assert like.ideal_hit_share == pytest.approx(seed.ideal_hit_share, abs=0.08)
    assert like.input is not None
    assert seed.input is not None
    assert like.input.mean == pytest.approx(seed.input.mean, rel=0.1)
    assert like.span_s == pytest.approx(40, rel=0.1)


def test_one_seed_gives_one_trace() -> None:
    assert synthetic(seed=4).rounds == synthetic(seed=4).rounds
    assert synthetic(seed=4).rounds != synthetic(seed=5).rounds


def test_each_option_changes_what_it_names() -> None:
    base = analyze(synthetic(), 16)
    deeper = analyze(synthetic(prefix_len_multiplier=3), 16)
    copies = analyze(synthetic(prefix_root_multiplier=8), 16)
    shorter = analyze(synthetic(prompt_len_multiplier=0.25), 16)
    assert deeper.ideal_hit_share > base.ideal_hit_share + 0.05
    assert copies.ideal_hit_share < base.ideal_hit_share - 0.01
    assert copies.input_tokens == base.input_tokens
    assert shorter.input_tokens < base.input_tokens
    assert synthetic(osl_multiplier=4).rounds[0].output_tokens > 1
    assert analyze(synthetic(speedup_ratio=10), 16).span_s == pytest.approx(base.span_s / 10)
    assert max(r.input_tokens for r in synthetic(max_isl=500).rounds) <= 500


def test_impossible_options_are_rejected() -> None:
    with pytest.raises(SynthesisError, match="at most 1 tokens"):
        synthetic(max_isl=1)
    empty = Workload(tree=Tree(), sessions=[], rounds=[])
    with pytest.raises(SynthesisError, match="no requests"):
        Synthesizer(empty, SynthesisOptions(num_requests=1))
    chained = seed_trace(4)
    chained.rounds[1] = msgspec.structs.replace(chained.rounds[1], after=(0,))
    with pytest.raises(SynthesisError, match="closed-loop"):
        Synthesizer(chained, SynthesisOptions(num_requests=1))
