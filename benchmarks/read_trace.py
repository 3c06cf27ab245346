"""CPU seconds and memory of reading and analysing a trace, in turns with another checkout.

`--build CHECKOUT` names one with a virtual environment of its own; both run in fresh processes.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median

PROGRAM = """
import resource, sys, time
from kvmesh.workload.analysis.analysis import analyze
from kvmesh.workload.formats.registry import load
begun = time.process_time()
workload, _ = load(sys.argv[1])
read = time.process_time()
share = analyze(workload).ideal_hit_share
ended = time.process_time()
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(read - begun, ended - read, memory, len(workload), share)
"""


def measured(checkout: Path, trace: Path) -> list[float]:
    """Seconds of reading and analysing, MiB at most, requests, and the ideal share."""
    python = checkout / ".venv" / "bin" / "python"
    command = [str(python), "-c", PROGRAM, str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=checkout)
    return [float(value) for value in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--build", type=Path, help="the other checkout")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    builds = {"this": Path(__file__).parents[1]}
    if arguments.build is not None:
        builds["other"] = arguments.build.resolve()
    runs: dict[str, list[list[float]]] = {name: [] for name in builds}
    for _ in range(arguments.runs):
        for name, checkout in builds.items():
            runs[name].append(measured(checkout, arguments.trace.resolve()))
    for name, figures in runs.items():
        read, analysed, memory, requests, share = map(median, zip(*figures, strict=True))
        sys.stdout.write(
            f"{name:<6} {requests:,.0f} requests: read {read:.2f} s, analysed {analysed:.2f} s of "
            f"CPU, {memory:,.0f} MiB, ideal share {share:.4%}\n"
        )


if __name__ == "__main__":
    main()
