"""The share of prompts that a cache of limited size would hold."""

from collections import OrderedDict
from random import Random

from kvmesh.workload.analysis.memory import held_shares, touched_block_size
from kvmesh.workload.analysis.sharing import ideal_hits
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

SIZE = 16


def conversations(count: int) -> Workload:
    """`count` prompts of 64 tokens without sharing, each asked twice in random order."""
    tree = Tree()
    order = [tree.fork() for _ in range(count)] * 2
    Random(1).shuffle(order)
    rounds = [
        Round(session=0, branch=b, output_branch=b, input_tokens=64, output_tokens=0) for b in order
    ]
    return Workload(tree=tree, sessions=[Session(name="s")], rounds=rounds)


def test_a_cache_of_all_blocks_is_ideal() -> None:
    workload = AgentGenerator(load_profile("demo"), 1).workload(8)
    total = sum(round_.input_tokens for round_ in workload.rounds)
    ideal = sum(ideal_hits(workload, SIZE)) / total
    (found,) = held_shares(workload, [10**9], SIZE)
    assert abs(found - ideal) < 0.002


def test_a_small_cache_evicts_the_oldest_prompts() -> None:
    workload = conversations(40)
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for round_ in workload.rounds:
        hits += round_.branch in held
        held[round_.branch] = None
        held.move_to_end(round_.branch)
        while len(held) > 10:
            held.popitem(last=False)
    assert held_shares(workload, [640], SIZE) == [hits / 80]


def test_blocks_grow_with_the_workload() -> None:
    assert touched_block_size(conversations(4)) == 16
    rounds = [
        Round(session=0, branch=0, output_branch=0, input_tokens=10**6, output_tokens=0)
    ] * 1000
    large = Workload(tree=Tree(), sessions=[Session(name="s")], rounds=rounds, block_size=64)
    assert touched_block_size(large) == 2048
