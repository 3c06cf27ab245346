"""The CPU of a short request and of an agent turn, by process, package and function.

Measures the CPU of all processes under load, then samples the processes of one role after another
with py-spy (`--py-spy`, PyPI's) under the same load, as sampling slows a process down. A sample
counts for the deepest function of kvmesh on its stack, with the libraries and the kernel that it
calls. Shares are of the CPU of all processes, NATS included.
"""

import itertools
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import uvloop
from chat_load import chat, drive, prompts, user
from common import Interval, measure, parser
from local_mesh import Mesh, running_mesh
from rows import CONCURRENCY, SHORT, TURN, conversation

SPIED = ("frontend", "router", "indexer", "worker")
LOADED_S, RATE = 5, 250
LEAST = 0.01  # of all CPU
FUNCTIONS = 0.004  # of all CPU: those that are named
LOOP = ("event loop, sockets", "")  # called by the function that runs the service
IDLE = ("concurrent/futures/thread.py", "threading.py")  # threads that wait


def owner(stack: list[str]) -> tuple[str, str] | None:
    """The package and function to which a sample belongs; None if its thread waits.

    Frames read `name (file:line)`.
    """
    frames = [frame.rpartition(" (") for frame in stack]
    if any(file in frames[-1][2] for file in IDLE):
        return None
    for function, _, file in reversed(frames):
        if "/kvmesh/" in file:
            package, _, module = file.rpartition("/kvmesh/")[2].rpartition(".py")[0].rpartition("/")
            return LOOP if module == "service" and package == "runtime" else (package, function)
    return ("other libraries", "")


def load(mesh: Mesh, bodies: Iterator[bytes], concurrency: int) -> tuple[Interval, int]:
    """Send requests for some seconds; the CPU of all processes, and the number of requests."""
    sent, started = 0, time.monotonic()
    with measure(mesh.pids) as used:
        while time.monotonic() - started < LOADED_S:
            batch = itertools.islice(bodies, concurrency * 8)
            sent += len(uvloop.run(drive(mesh.url, batch, concurrency)))
    return used, sent


def sample(
    py_spy: Path, mesh: Mesh, bodies: Iterator[bytes], concurrency: int
) -> dict[str, dict[tuple[str, str], float]]:
    """CPU milliseconds a request by role and function."""
    load(mesh, bodies, concurrency)
    used, sent = load(mesh, bodies, concurrency)
    found = {"nats": {("the server", ""): used.of("nats") / sent * 1e3}}
    options = f"record -d {LOADED_S} -r {RATE} --full-filenames -f raw".split()
    for role in SPIED:
        spies: dict[Path, subprocess.Popen[bytes]] = {}
        for name, pid in mesh.pids.items():
            if name.startswith(role):
                file = mesh.folder / f"{name}.stacks"
                command = [str(py_spy), *options, "-o", str(file), "--pid", str(pid)]
                spies[file] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        load(mesh, bodies, concurrency)
        stacks: Counter[tuple[str, str]] = Counter()
        for file, spy in spies.items():
            spy.wait()
            stacks += read(file)
        spent = used.of(role) / sent * 1e3 / stacks.total()
        found[role] = {function: number * spent for function, number in stacks.items()}
    return found


def read(file: Path) -> Counter[tuple[str, str]]:
    """Samples by package and function. A line is `frame;frame;… number`, outermost first."""
    found: Counter[tuple[str, str]] = Counter()
    for line in file.read_text().splitlines():
        stack, _, number = line.rpartition(" ")
        if function := owner(stack.split(";")):
            found[function] += int(number)
    return found


def table(found: dict[str, dict[tuple[str, str], float]]) -> str:
    """Markdown: each process, its packages with a share of at least 1 %, and all others."""
    whole = sum(sum(functions.values()) for functions in found.values())
    lines = ["| process, package | CPU ms | share | functions |", "| --- | --: | --: | --- |"]
    for role, functions in sorted(found.items(), key=lambda item: -sum(item[1].values())):
        spent = sum(functions.values())
        lines.append(f"| **{role}** | {spent:.2f} | {spent / whole:.0%} | |")
        packages: Counter[str] = Counter()
        for (package, _), cpu in functions.items():
            packages[package] += cpu  # type: ignore[assignment]
        large = [each for each in packages.most_common() if each[1] >= LEAST * whole]
        for package, cpu in large if len(packages) > 1 else []:
            named = sorted(
                ((used / whole, name) for (of, name), used in functions.items() if of == package),
                reverse=True,
            )
            most = ", ".join(f"`{n}` {share:.1%}" for share, n in named if n and share >= FUNCTIONS)
            lines.append(f"| {package} | {cpu:.3f} | {cpu / whole:.1%} | {most} |")
        rest = spent - sum(cpu for _, cpu in large)
        if rest >= FUNCTIONS * whole:
            lines.append(
                f"| {len(packages) - len(large)} more | {rest:.3f} | {rest / whole:.1%} | |"
            )
    return "\n".join(lines)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--py-spy", type=Path, required=True, metavar="PROGRAM")
    options = arguments.parse_args()
    short = (chat(user(text), 16, False) for text in prompts(1, SHORT))
    with running_mesh() as mesh:
        for name, bodies, concurrency in (
            ("a short request", short, CONCURRENCY),
            ("an agent turn of 40K tokens", turns(), 1),
        ):
            found = sample(options.py_spy, mesh, bodies, concurrency)
            print(f"{name}:\n\n{table(found)}\n")


def turns() -> Iterator[bytes]:
    """Turns of one conversation after another."""
    for seed in itertools.count(1):
        yield from conversation(prompts(seed, TURN // 2), 40_000, 100)


if __name__ == "__main__":
    main()
