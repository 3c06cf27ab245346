"""Frontend CPU of a short request and of a streamed token, beside another build in the same run.

Each build has a mesh of its own; they take turns in being first, and each pair gives a ratio.
`--build` names a checkout with its `.venv`.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import uvloop
from agents_cache import HERE, THERE, kind_of
from chat_load import chat, drive, prompts
from common import Report, cpu_seconds, median, parser
from local_mesh import Mesh, running_mesh

WORKERS, CONCURRENCY = 2, 16
SHORT, STREAMS, TOKENS = 600, 48, 256
SEEDS = itertools.count(1)


def bodies(count: int, output: int, stream: bool) -> Iterator[bytes]:
    texts = itertools.islice(prompts(next(SEEDS), 28), count)
    return iter([chat([{"role": "user", "content": text}], output, stream) for text in texts])


def used(mesh: Mesh, count: int, output: int, stream: bool) -> float:
    """CPU seconds of the frontend."""
    pid = mesh.pids["frontend"]
    before = cpu_seconds(pid)
    uvloop.run(drive(mesh.url, bodies(count, output, stream), CONCURRENCY))
    return cpu_seconds(pid) - before


def compare(meshes: dict[str, Mesh], pairs: int, report: Report) -> float:
    """The larger of the two ratios."""
    medians = []
    for name, unit, factor, load in (
        ("short request", "CPU ms/request", 1e3 / SHORT, (SHORT, 16, False)),
        ("streamed token", "CPU µs/token", 1e6 / STREAMS / TOKENS, (STREAMS, TOKENS, True)),
    ):
        runs: dict[str, list[float]] = {build: [] for build in meshes}
        for mesh in meshes.values():
            used(mesh, *load)  # its code and tables are warm afterwards
        order = [*meshes]
        for _ in range(pairs):
            for build in order:
                runs[build].append(used(meshes[build], *load) * factor)
            order.reverse()
        for build, values in runs.items():
            report.add_runs(f"frontend, {name}: {build}", values, unit)
        ratios = [a / b for a, b in zip(runs[HERE], runs[THERE], strict=True)]
        report.add_runs("    ratio, pair by pair", ratios, "", target="≤ 1.0")
        medians.append(median(ratios))
    return max(medians)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--build", type=Path, required=True, help="the other checkout")
    arguments.add_argument("--pairs", type=int, default=12)
    options = arguments.parse_args()
    report = Report("The frontend of two builds", "")
    with ExitStack() as stack:
        meshes = {
            name: stack.enter_context(running_mesh(WORKERS, 1000.0, 1, kind_of(checkout)))
            for name, checkout in ((HERE, None), (THERE, options.build))
        }
        ratio = compare(meshes, options.pairs, report)
    report.finish(f"frontend: {ratio:.3f} of the other build", options.json)


if __name__ == "__main__":
    main()
