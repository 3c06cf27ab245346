"""The CPU of a short request and of an agent turn, by process and module.

Measures the CPU of all processes under load, then samples one Python process after another with
py-spy (`--py-spy`, PyPI's) under the same load, as sampling slows a process down. A sample counts
for the deepest module of kvmesh on its stack, with the libraries and the kernel that it calls.
Shares are of the CPU of all processes, NATS included.
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

SPIED = ("frontend", "router", "indexer", "worker-0")
LOADED_S, RATE = 5, 250
LEAST = 0.01  # of all CPU
LOOP = "event loop, sockets"  # called by no module but the one that runs the service
IDLE = ("concurrent/futures/thread.py", "threading.py")  # threads that wait


def owner(stack: list[str]) -> str | None:
    """The module to which a sample belongs; None if its thread waits.

    Frames read `name (file:line)`.
    """
    frames = [frame.rpartition(" (") for frame in stack]
    if any(file in frames[-1][2] for file in IDLE):
        return None
    for _, _, file in reversed(frames):
        if "/kvmesh/" in file:
            module = file.rpartition("/kvmesh/")[2].rpartition(".py")[0]
            return LOOP if module == "runtime/service" else f"`{module}`"
    return "other libraries"


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
) -> dict[str, dict[str, float]]:
    """CPU milliseconds a request by role and module."""
    load(mesh, bodies, concurrency)
    used, sent = load(mesh, bodies, concurrency)
    found = {"nats": {"the server": used.of("nats") / sent * 1e3}}
    for name in SPIED:
        file = mesh.folder / f"{name}.stacks"
        options = f"record -d {LOADED_S} -r {RATE} --full-filenames -f raw".split()
        command = [str(py_spy), *options, "-o", str(file), "--pid", str(mesh.pids[name])]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL):
            load(mesh, bodies, concurrency)
        role, stacks = name.partition("-")[0], read(file)
        spent = used.of(role) / sent * 1e3 / stacks.total()
        found[role] = {module: number * spent for module, number in stacks.items()}
    return found


def read(file: Path) -> Counter[str]:
    """Samples by module. A line is `frame;frame;… number`, outermost first."""
    found: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        stack, _, number = line.rpartition(" ")
        if module := owner(stack.split(";")):
            found[module] += int(number)
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown: each process, its modules with a share of at least 1 %, and all others."""
    sums = {role: sum(modules.values()) for role, modules in found.items()}
    whole = sum(sums.values())
    lines = ["| process, module | CPU ms | share |", "| --- | --: | --: |"]
    for role in sorted(found, key=lambda each: -sums[each]):
        lines.append(f"| **{role}** | {sums[role]:.2f} | {sums[role] / whole:.0%} |")
        large = {m: spent for m, spent in found[role].items() if spent >= LEAST * whole}
        small = len(found[role]) - len(large)
        if small:
            large[f"{small} more"] = sums[role] - sum(large.values())
        for module, spent in sorted(large.items(), key=lambda item: -item[1]):
            if len(large) > 1:
                lines.append(f"| {module} | {spent:.3f} | {spent / whole:.1%} |")
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
