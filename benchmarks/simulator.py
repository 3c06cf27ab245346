"""The speed of the simulator: requests per CPU second, with nodes, and with a thousand engines."""

import resource
import time
from pathlib import Path
from random import Random

from common import Report, parser

from kvmesh.cli.main import cores
from kvmesh.settings.schema import KvbmSettings, MockSettings, RouterSettings, WorkerSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.nodes.options import NodeOptions, node_options
from kvmesh.simulator.options import Network, SimulationOptions, WorkerOptions
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.formats.registry import load
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

TOKENS = 262_144
PEER = "7,000–17,000"


def families(requests: int, per_second: float, count: int = 2000, seed: int = 0) -> Workload:
    """Open-loop requests; each continues one of `count` prompts of 1,024 to 8,192 tokens."""
    rng, tree = Random(seed), Tree()
    roots = [(tree.fork(), 512 * rng.randrange(2, 17)) for _ in range(count)]
    rounds = []
    for number in range(requests):
        root, length = rng.choice(roots)
        own = 512 * rng.randrange(1, 5)
        branch = tree.fork(root, length)
        rounds.append(
            Round(
                session=number,
                branch=branch,
                output_branch=branch,
                input_tokens=length + own,
                output_tokens=rng.randrange(20, 200),
                at_s=number / per_second,
            )
        )
    sessions = [Session(name=f"s{number}") for number in range(requests)]
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def speed(workload: Workload, workers: int, block: int, nodes: NodeOptions | None = None) -> float:
    """Requests per CPU second."""
    core = CoreOptions(TOKENS // block, SchedulerLimits(block_size=block))
    fleet = (WorkerOptions(workers, core),)
    network = Network(loads=0.25 if workers < 100 else 2.0)
    options = SimulationOptions(
        router=RouterSettings(policy="kv"), workers=fleet, network=network, nodes=nodes
    )
    begun = time.process_time()
    Simulation(workload, options).run()
    return len(workload) / (time.process_time() - begun)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="the conversation trace")
    arguments.add_argument("--runs", type=int, default=3, metavar="N", help="of each size (3)")
    arguments.add_argument("--requests", type=int, default=100_000, metavar="N", help="fleet row")
    chosen = arguments.parse_args()
    report = Report(f"Simulator speed (kv, cores {cores()})", "Dynamo replay")
    if chosen.trace is not None and chosen.trace.exists():
        trace, _ = load(str(chosen.trace))
        for block in (512, 64, 16):
            runs = [speed(trace.first(4000), 4, block) for _ in range(chosen.runs)]
            name = f"conversation trace, 4 workers, block {block}"
            report.add_runs(name, runs, "requests/CPU s", PEER, "≥ 5,000")
        kvbm = KvbmSettings(host_bytes=128 << 30, disk_path=Path("unused"), disk_bytes=1 << 40)
        nodes = node_options(2, kvbm, MockSettings(), WorkerSettings(), store_bps=5e9)
        for block in (512, 64):
            runs = [speed(trace.first(1000), 4, block, nodes) for _ in range(chosen.runs)]
            report.add_runs(f"… on 2 nodes, block {block}", runs, "requests/CPU s", "", "")
    else:
        print("skipping the conversation trace: --trace names none")
    begun = time.process_time()
    speed(families(chosen.requests, per_second=1500.0), 1000, 512)
    took = time.process_time() - begun
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    report.add(f"1,000 workers, {chosen.requests:,} requests", took, "CPU s", "", "< 600")
    report.add("… memory", memory, "GiB", "", "< 4")
    summary = f"simulator: {chosen.requests:,} requests on 1,000 engines in {took:.0f} CPU s"
    report.finish(f"{summary} and {memory:.1f} GiB", chosen.json)


if __name__ == "__main__":
    main()
