"""CPU that tracing costs: requests of equal meshes without traces, with 10 % and 100 % traced.

The meshes run at once, and rounds of requests go to each in turn, so that the noise of the machine
meets all of them. A collector in this process accepts and drops the spans.
"""

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import uvloop
from chat_load import chat, drive, prompts, user
from common import Interval, Report, measure, median, parser
from local_mesh import Mesh, running_mesh

CONCURRENCY = 16
WORKERS = 2
OFF = "off"
TAIL = {"KVMESH_TRACING_TAIL": "true", "KVMESH_TRACING_SLOW_S": "3600"}
MODES: dict[str, dict[str, str] | None] = {
    OFF: None,
    "10 %": {"KVMESH_TRACING_SAMPLE_RATIO": "0.1"},
    "10 % and tail": {"KVMESH_TRACING_SAMPLE_RATIO": "0.1", **TAIL},
    "100 %": {"KVMESH_TRACING_SAMPLE_RATIO": "1"},
}
TARGET = "≤ 5 % at 10 %"


@dataclass(frozen=True)
class Load:
    """One kind of request: tokens in and out, and the number of requests in a round."""

    name: str
    prompt: int
    output: int
    requests: int


LOADS = (Load("short", 28, 16, 600), Load("agent turn", 8000, 128, 80))


class Dropped(BaseHTTPRequestHandler):
    """Accepts spans and drops them; `received` counts their bytes."""

    protocol_version = "HTTP/1.1"
    received = 0

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        self.rfile.read(size)
        Dropped.received += size
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


def bodies(seed: int, load: Load) -> Iterator[bytes]:
    texts = itertools.islice(prompts(seed, load.prompt), load.requests)
    return iter([chat(user(t), load.output, True) for t in texts])


def run(mesh: Mesh, seed: int, load: Load) -> Interval:
    sent = bodies(seed, load)
    with measure(mesh.pids) as interval:
        uvloop.run(drive(mesh.url, sent, CONCURRENCY))
    return interval


def compare(report: Report, meshes: dict[str, Mesh], load: Load, rounds: int) -> float:
    """Report the costs of one kind of request; returns the extra share of all processes at 10 %."""
    ms: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(-1, rounds):  # the first round warms the meshes up
        order = list(meshes.items())
        shift = number % len(order)
        for mode, mesh in order[shift:] + order[:shift]:
            interval = run(mesh, number + 1, load)
            if number < 0:
                continue
            for role in ("frontend", "router", "worker", ""):
                cpu = sum(
                    s for n, s in interval.cpu_s.items() if n.startswith(role) and n != "nats"
                )
                ms[mode, role].append(1e3 * cpu / load.requests)
    for role in ("frontend", "router", "worker", ""):
        name = f"{load.name}: {role or 'all processes'}"
        base = ms[OFF, role]
        report.add_runs(f"{name}, off", base, "CPU ms/request")
        for mode in list(MODES)[1:]:
            extra = [100 * (m / b - 1) for m, b in zip(ms[mode, role], base, strict=True)]
            target = TARGET if mode == "10 %" else ""
            report.add_runs(f"    {mode}", extra, "% more", f"{median(base):.3g} ms", target)
    pairs = zip(ms["10 %", ""], ms[OFF, ""], strict=True)
    return median([100 * (m / b - 1) for m, b in pairs])


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=16, help="rounds of each load")
    options = arguments.parse_args()
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Dropped)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    sent = {
        "KVMESH_TRACING_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
        "KVMESH_TRACING_PROTOCOL": "http",
    }
    report = Report("CPU of tracing, paired with meshes that do not trace", "off")
    with ExitStack() as stack:
        meshes = {
            mode: stack.enter_context(
                running_mesh(
                    WORKERS, 1000.0, 1, Mesh, **({} if extra is None else {**sent, **extra})
                )
            )
            for mode, extra in MODES.items()
        }
        shares = [compare(report, meshes, load, options.rounds) for load in LOADS]
    texts = [f"{load.name} {share:+.1f} %" for load, share in zip(LOADS, shares, strict=True)]
    summary = f"tracing 10 % of requests: {', '.join(texts)} CPU per request"
    report.finish(f"{summary}; {Dropped.received / 1e6:.1f} MB of spans", options.json)


if __name__ == "__main__":
    main()
