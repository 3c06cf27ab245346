"""Compares the simulator's results with those of another checkout, byte for byte.

A change that only makes it faster must leave them as they are. `--build` names the other checkout,
which has a `.venv`: `make bench BASE=COMMIT` makes one.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from common import parser

HERE = Path(__file__).parent.parent
AGENTS = "coding-agents --limit 400"
SCENARIOS = {
    "policies": f"{AGENTS} --workers 2 --policy kv,session,round-robin",
    "full caches": "unattended-agents --limit 800 --speed 4 --workers 2 --mock-blocks 12000",
    "two routers": f"{AGENTS} --routers 2 --event-loss 0.02 --fault die:0@20 --fault join:0@60",
    "tiers": f"{AGENTS} --workers 2 --mock-blocks 4000 --mock-host-blocks 8000",
    "nodes": "coding-agents --limit 100 --nodes 2 --mock-blocks 4000 --kvbm-host-bytes 8589934592",
    "disaggregated": f"{AGENTS} --group 1:serves=prefill --group 2:serves=decode",
    "planner": f"{AGENTS} --workers 1 --planner --startup 20 --planner-ttft p95=500ms",
    "unlike engines": f"{AGENTS} --group 2 --group 1:slow_prefill=3,slow_decode=3 --mock-noise 3",
}
TRACE_SCENARIOS = {
    "trace, large blocks": "--limit 1500 --block-size 512 --mock-blocks 512",
    "trace, small blocks": "--limit 300 --speed 2 --policy kv,round-robin",
}


def results(checkout: Path, arguments: str) -> bytes:
    """The figures of one run as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        command = [str(checkout / ".venv/bin/kvmesh"), "simulate", *arguments.split()]
        subprocess.run([*command, "--json", str(file)], check=True, stdout=subprocess.DEVNULL)
        return file.read_bytes()


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--build", type=Path, required=True, metavar="CHECKOUT")
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="also of a recorded trace")
    chosen = arguments.parse_args()
    scenarios = dict(SCENARIOS)
    if chosen.trace is not None:
        traces = {name: f"{chosen.trace} {rest}" for name, rest in TRACE_SCENARIOS.items()}
        scenarios |= traces
    differ = [
        name
        for name, each in scenarios.items()
        if results(HERE, each) != results(chosen.build, each)
    ]
    for name in differ:
        print(f"differs: {name}: kvmesh simulate {scenarios[name]}")
    print(f"{len(scenarios) - len(differ)} of {len(scenarios)} scenarios have the same results")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
