"""A workload whose prompts share prefixes and have no sessions."""

import random

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
