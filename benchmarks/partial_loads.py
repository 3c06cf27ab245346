"""Time to the first token of a prompt that is computed, loaded, or both at once, by bandwidth.

A simulated engine with room for one and a half prompts meets four prompts in turn, so that its node
holds each prompt that returns, and the engine does not.
"""

import argparse
from dataclasses import replace

from common import median
from rich.console import Console
from rich.table import Table

from kvmesh.settings.schema import KvbmSettings, MockSettings, RouterSettings, WorkerSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.nodes.options import NodeOptions, node_options
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

BLOCK = 256
PROMPTS, PASSES = 4, 6
APART_S = 60.0
GB = 1e9


def cycles(tokens: int) -> Workload:
    """The same prompts over and over, one at a time."""
    tree = Tree()
    branches = [tree.fork() for _ in range(PROMPTS)]
    rounds = [
        Round(
            session=number % PROMPTS,
            branch=branches[number % PROMPTS],
            output_branch=branches[number % PROMPTS],
            input_tokens=tokens,
            output_tokens=20,
            at_s=APART_S * number,
        )
        for number in range(PROMPTS * PASSES)
    ]
    names = [Session(name=f"s{number}") for number in range(PROMPTS)]
    return Workload(tree=tree, sessions=names, rounds=rounds)


def play(workload: Workload, tokens: int, node: NodeOptions | None) -> tuple[float, float]:
    """Median seconds to the first token, and tokens cached, of the prompts of the last pass."""
    blocks = 3 * tokens // (2 * BLOCK)
    core = CoreOptions(blocks, SchedulerLimits(block_size=BLOCK), emit_tokens=False)
    options = SimulationOptions(
        router=RouterSettings(), workers=(WorkerOptions(1, core),), nodes=node
    )
    simulation = Simulation(workload, options)
    simulation.run()
    records = simulation.records
    waited = records.column("first_token") - records.column("arrived")
    return median(waited[-PROMPTS:].tolist()), median(records.cached[-PROMPTS:])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=100_000)
    arguments.add_argument("--bandwidths", default="0.5,1.5,3,8,25", help="GB/s")
    given = arguments.parse_args()
    mock, workload = MockSettings(), cycles(given.tokens)
    size = mock.kv_bytes_per_token * given.tokens
    memory = KvbmSettings(host_bytes=(PROMPTS + 1) * size)
    node = node_options(1, memory, mock, WorkerSettings(), mock.transfer_bytes_per_s)
    computed, _ = play(workload, given.tokens, None)
    table = Table(title=f"TTFT of {given.tokens:,} tokens", title_justify="left")
    for name in ("GB/s", "computed", "loaded", "both", "sum of both speeds", "tokens loaded"):
        table.add_column(name, justify="right")
    for bandwidth in map(float, given.bandwidths.split(",")):
        loaded = size / (bandwidth * GB)
        linked = replace(node, links=replace(node.links, host=bandwidth * GB))
        both, cached = play(workload, given.tokens, linked)
        ideal = computed * loaded / (computed + loaded)
        seconds = [f"{value:.2f} s" for value in (computed, loaded, both, ideal)]
        table.add_row(f"{bandwidth:g}", *seconds, f"{cached:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
