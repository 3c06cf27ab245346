"""Messages, bytes and CPU of 1,000 short requests and of 1,000 streamed tokens, 32 at once.

With `--build CHECKOUT`, which has a `.venv`, both builds serve at the same time and are loaded in
turns, in an order that is reversed each round. NATS counts what each connection sends and receives,
payloads with headers; the use of a resting mesh over the same time is subtracted. Without it, the
table says what travels by subject, as a subscriber of everything sees it: what is published, and
each delivery of a stream to a reader.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nats
import uvloop
from chat_load import drive
from common import measure, parser
from kvmesh_fleet import WORKERS, KvmeshSide
from local_mesh import Mesh, free_port, kind_of, running_mesh, step_profile
from nats.aio.msg import Msg
from pairs import Ratio, table
from rows import CONCURRENCY, FAST_MS, SHORT, STEP_MS, Load

REST_S = 3.0
SETTLE_S = 0.5  # records that follow the answers
FIGURES = {"messages": "", "bytes": "", "CPU": "ms"}


class Traffic(NamedTuple):
    """A load: requests of so many tokens each; figures count `units` of it, such as tokens."""

    name: str
    step_ms: float
    requests: int
    tokens: int
    stream: bool

    @property
    def units(self) -> int:
        return self.requests * (self.tokens if self.stream else 1)

    def bodies(self, mesh: Mesh, seed: int) -> list[bytes]:
        load = Load(mesh, seed, 1.0)
        return load.bodies(SHORT, self.requests, self.tokens, self.stream)


LOADS = (
    Traffic("1,000 short requests", FAST_MS, 600, 16, False),
    Traffic("1,000 streamed tokens", FAST_MS, 256, 256, True),
    Traffic("1,000 paced tokens", STEP_MS, 64, 256, True),
)


def monitored(checkout: Path | None) -> type[Mesh]:
    """A mesh of a checkout whose NATS server counts for `sent_and_received`."""

    class Monitored(kind_of(checkout)):  # type: ignore[misc]
        def start(self, workers: int) -> None:
            self.monitor = free_port()
            super().start(workers)

        def _spawn(self, name: str, command: list[str], options: dict[str, str]) -> None:
            monitor = ["--http_port", str(self.monitor)] if name == "nats" else []
            super()._spawn(name, command + monitor, options)

    return Monitored


@contextlib.contextmanager
def serving(checkout: Path | None, load: Traffic) -> Iterator[Mesh]:
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        profile = str(step_profile(Path(folder), load.step_ms))
        kind = monitored(checkout)
        with running_mesh(WORKERS, 1.0, 1, kind, KVMESH_MOCK_PROFILE=profile) as mesh:
            yield mesh


def sent_and_received(mesh: Any) -> Counter[str]:
    """All messages and bytes so far, of both directions."""
    with urllib.request.urlopen(f"http://127.0.0.1:{mesh.monitor}/connz") as answer:
        connections = json.load(answer)["connections"]
    return Counter(
        messages=sum(each["in_msgs"] + each["out_msgs"] for each in connections),
        bytes=sum(each["in_bytes"] + each["out_bytes"] for each in connections),
    )


def figures(mesh: Mesh, load: Traffic, seed: int) -> dict[str, float]:
    """The figures of 1,000 units of a load."""

    def used(bodies: list[bytes], seconds: float) -> tuple[Counter[str], float, float]:
        before = sent_and_received(mesh)
        with measure(mesh.pids) as use:
            if bodies:
                uvloop.run(drive(mesh.url, iter(bodies), CONCURRENCY))
            time.sleep(seconds)
        after = sent_and_received(mesh)
        after.subtract(before)
        return after, use.total_s * 1e3, use.wall_s

    counts, cpu_ms, wall_s = used(load.bodies(mesh, seed), SETTLE_S)
    idle, idle_ms, idle_s = used([], REST_S)
    rest, factor = wall_s / idle_s, 1000 / load.units
    found = {kind: (counts[kind] - idle[kind] * rest) * factor for kind in counts}
    return {**found, "CPU": (cpu_ms - idle_ms * rest) * factor}


def compared(load: Traffic, build: Path, rounds: int) -> list[Ratio]:
    """The figures of both builds, round by round."""
    with serving(None, load) as here, serving(build, load) as there:
        for mesh in (here, there):
            figures(mesh, load, 0)  # every process runs its code for the first time
        found: list[tuple[dict[str, float], dict[str, float]]] = []
        for number in range(1, rounds + 1):
            order = (here, there) if number % 2 else (there, here)
            taken = {id(mesh): figures(mesh, load, number) for mesh in order}
            found.append((taken[id(here)], taken[id(there)]))
    return [
        Ratio(
            f"{load.name}: {kind}",
            unit,
            [a[kind] for a, _ in found],
            [b[kind] for _, b in found],
            0.7,
        )
        for kind, unit in FIGURES.items()
    ]


# --- by subject


def kind_of_message(msg: Msg) -> str:
    """The kind of a subject of the mesh; of replies and of JetStream's own messages their use."""
    first, _, rest = msg.subject.partition(".")
    if msg.reply.startswith("$JS.ACK."):
        return f"{msg.subject.split('.')[2]}, delivered" if first == "kvm" else "cards, delivered"
    if first == "kvm":
        return rest.split(".")[1]
    if first == "$KV":
        return "cards"
    if msg.data.startswith(b'{"stream"'):
        return "acknowledgements of JetStream"
    if first == "$JS" or "Status" in (msg.headers or {}):
        return "flow control, heartbeats"
    return "replies"


async def by_kind(mesh: Mesh, load: Traffic) -> tuple[Counter[str], Counter[str]]:
    """Messages and bytes of a load, by kind."""
    messages: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    client = await nats.connect(mesh.nats_url)

    async def count(msg: Msg) -> None:
        kind = kind_of_message(msg)
        messages[kind] += 1
        sizes[kind] += len(msg.data)

    await drive(mesh.url, iter(load.bodies(mesh, 0)), CONCURRENCY)
    await client.subscribe(">", cb=count)
    await client.flush()
    await drive(mesh.url, iter(load.bodies(mesh, 1)), CONCURRENCY)
    await asyncio.sleep(SETTLE_S)
    await client.close()
    return messages, sizes


def subjects(build: Path | None) -> str:
    """Markdown: messages and bytes by kind, for each load."""
    found: list[tuple[Counter[str], Counter[str], Traffic]] = []
    for load in LOADS:
        with serving(build, load) as mesh:
            found.append((*uvloop.run(by_kind(mesh, load)), load))
    kinds = sorted({k for counts, _, _ in found for k in counts}, key=lambda k: -found[0][0][k])
    lines = [
        "| what | " + " | ".join(load.name for load in LOADS) + " |",
        "| --- |" + " --: |" * len(found),
    ]
    for kind in kinds:
        cells = (
            f"{counts[kind] * 1000 / load.units:,.0f}, {sizes[kind] / load.units:,.2f} kB"
            for counts, sizes, load in found
        )
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--build", type=Path, metavar="CHECKOUT")
    arguments.add_argument("--rounds", type=int, default=7, metavar="N")
    options = arguments.parse_args()
    if options.build is None:
        print(subjects(None))
        return 0
    ratios = [each for load in LOADS for each in compared(load, options.build, options.rounds)]
    sides = KvmeshSide("this build", None), KvmeshSide("the other", options.build)
    print(table(ratios, *sides, {}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
