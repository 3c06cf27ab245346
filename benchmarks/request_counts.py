"""Messages, bytes, tasks, allocations and wake-ups of a request, by role.

NATS counts messages and bytes by connection. The roles count their tasks and Python allocations
themselves, by `counted_role.py`; the kernel counts their wake-ups. The counts of an idle mesh over
the same time are subtracted. Counts do not depend on the load of the machine, unlike times. Needs a
C compiler.
"""

import itertools
import json
import struct
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections import Counter
from pathlib import Path

import uvloop
from chat_load import chat, drive, prompts, user
from common import parser
from local_mesh import Mesh, free_port, running_mesh
from rows import CONCURRENCY, IDLE_S, SHORT, TURN, conversation

HERE = Path(__file__).parent
ROLES = ("frontend", "router", "indexer", "worker", "nats")
COUNTS = ("messages out", "messages in", "bytes out", "bytes in", "tasks", "allocations")
WAKE_UPS = "wake-ups"


class CountedMesh(Mesh):
    """A mesh whose processes count."""

    def start(self, workers: int) -> None:
        self._numbers = itertools.count()
        self._monitor = free_port()
        self._library = str(self.folder / "allocations.so")
        include = sysconfig.get_path("include")
        flags = ["-O2", "-shared", "-fPIC", f"-I{include}", "-o", self._library]
        subprocess.run(["cc", str(HERE / "allocations.c"), *flags], check=True)
        super().start(workers)

    def command(self, role: str) -> list[str]:
        counters = self.folder / f"{role}.{next(self._numbers)}.counters"
        program = str(HERE / "counted_role.py")
        return [sys.executable, program, self._library, str(counters), role]

    def _spawn(self, name: str, command: list[str], options: dict[str, str]) -> None:
        monitor = ["--http_port", str(self._monitor)] if name == "nats" else []
        super()._spawn(name, command + monitor, options)

    def counts(self) -> Counter[tuple[str, str]]:
        """All counts so far, by role and kind."""
        found: Counter[tuple[str, str]] = Counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{self._monitor}/connz") as answer:
            connections = json.load(answer)["connections"]
        for each in connections:
            role = next((r for r in ROLES if each["name"].startswith(r)), "other")
            # `in` is the server's view: a client has sent it
            numbers = [each[k] for k in ("in_msgs", "out_msgs", "in_bytes", "out_bytes")]
            for kind, number in zip(COUNTS, numbers, strict=False):
                found[role, kind] += number
        for file in self.folder.glob("*.counters"):
            role = file.name.partition(".")[0]
            allocations, tasks = struct.unpack("QQ", file.read_bytes())
            found[role, "allocations"] += allocations
            found[role, "tasks"] += tasks
        for name, pid in self.pids.items():
            role = next(r for r in ROLES if name.startswith(r))
            found[role, WAKE_UPS] += switches(pid)
        return found


def switches(pid: int) -> int:
    """Times that a thread of the process has waited."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = (task / "status").read_text()
        found += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return found


def short(count: int, stream: bool) -> list[bytes]:
    return [chat(user(t), 16, stream) for t in itertools.islice(prompts(count, SHORT), count)]


def table(mesh: CountedMesh, bodies: list[bytes], concurrency: int) -> str:
    """Markdown: what each role counts for a request, without what it counts when idle.

    The first third of the requests comes before.
    """
    early = len(bodies) // 3
    uvloop.run(drive(mesh.url, iter(bodies[:early]), concurrency))
    time.sleep(1.0)  # for records that follow the answers
    before, started = mesh.counts(), time.perf_counter()
    time.sleep(IDLE_S)
    idle, idle_s = mesh.counts(), time.perf_counter() - started
    started = time.perf_counter()
    uvloop.run(drive(mesh.url, iter(bodies[early:]), concurrency))
    spent = time.perf_counter() - started
    after = mesh.counts()
    kinds = (*COUNTS, WAKE_UPS)
    lines = [f"| role | {' | '.join(kinds)} |", f"| --- |{' --: |' * len(kinds)}"]
    for role in ROLES:
        cells = []
        for kind in kinds:
            key = role, kind
            resting = (idle[key] - before[key]) * spent / idle_s
            number = (after[key] - idle[key] - resting) / (len(bodies) - early)
            counted = f"{number:,.0f}" if number >= 100 else f"{number:.1f}"
            cells.append(counted if key in after else "–")
        lines.append(f"| {role}{'s' * (role == 'worker')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser(__doc__ or "").parse_args()
    turns = list(conversation(prompts(1, TURN // 2), 40_000, 30))
    with running_mesh(kind=CountedMesh) as mesh:
        assert isinstance(mesh, CountedMesh)
        for name, bodies, concurrency in (
            ("a short request, 32 at once", short(900, False), CONCURRENCY),
            ("a short request, one at a time", short(150, True), 1),
            ("an agent turn of 40K tokens", turns, 1),
        ):
            print(f"{name}:\n\n{table(mesh, bodies, concurrency)}\n")


if __name__ == "__main__":
    main()
