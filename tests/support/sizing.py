"""Workloads of equal requests and kinds of workers, for sizing."""

from kvmesh.simulator.options import WorkerOptions
from kvmesh.simulator.sizing.fleets import WorkerKind
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree


def workload(per_second: float, requests: int = 120, tokens: int = 4000) -> Workload:
    tree = Tree()
    branches = [tree.fork() for _ in range(requests)]
    rounds = [
        Round(
            session=number,
            branch=branch,
            output_branch=branch,
            input_tokens=tokens,
            output_tokens=20,
            at_s=number / per_second,
        )
        for number, branch in enumerate(branches)
    ]
    sessions = [Session(name=str(number)) for number in range(requests)]
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def kind(name: str = "w", speedup: float = 0.1, cost: float = 1.0, most: int = 16) -> WorkerKind:
    core = CoreOptions(4096, SchedulerLimits(block_size=64), speedup=speedup)
    return WorkerKind(name, WorkerOptions(1, core, cost=cost), most)
