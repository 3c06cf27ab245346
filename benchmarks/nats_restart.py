"""Time from a restart of the NATS server to the first answer, beside another checkout.

Clients send short requests all the time. The server is killed (SIGKILL and SIGTERM in turns), stays
away for a while, and starts again with its store: the clock begins with its new process, and ends
with the next answer that a client gets. `--build` names the other checkout, which has a `.venv`.
"""

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean

from common import median, parser
from local_mesh import Mesh, kind_of, refusal, running_mesh, wait_for_port

CLIENTS = 4
SETTLED_S = 3.0  # of load before each restart
DEADLINE_S = 30.0
DOWN_S = 2.0  # at most between the end of the server and its new start, at random


class Restarts:
    """A mesh under short requests whose NATS server can be restarted."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._answered = threading.Condition()
        self._last = 0.0
        self._ends = False

    @contextmanager
    def load(self) -> Iterator[None]:
        self._ends = False
        clients = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self._ends = True
            for client in clients:
                client.join()

    def _ask(self) -> None:
        while not self._ends:
            reason = refusal(self._mesh.url)
            with self._answered:
                if reason is None:
                    self._last = time.monotonic()
                    self._answered.notify_all()

    def seconds(self, number: int, down_s: float) -> tuple[float, float]:
        """Seconds until the server listens again, and until the first answer."""
        server = self._mesh.processes["nats"]
        server.send_signal(number)
        server.wait()
        time.sleep(down_s)
        started = time.monotonic()
        self._mesh.restart_nats()
        wait_for_port(self._mesh.nats_port)
        listens = time.monotonic()
        with self._answered:
            if not self._answered.wait_for(lambda: self._last > started, DEADLINE_S):
                raise RuntimeError("no answer after the restart")
            return listens - started, self._last - started


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--build", type=Path, required=True, metavar="CHECKOUT")
    arguments.add_argument("--rounds", type=int, default=10, metavar="N")
    options = arguments.parse_args()
    sides = {"this build": None, "the other": options.build}
    found: dict[str, list[float]] = {name: [] for name in sides}
    listening: list[float] = []
    rng = random.Random(1)
    with ExitStack() as stack:
        meshes = {}
        for name, checkout in sides.items():
            mesh = stack.enter_context(running_mesh(2, kind=kind_of(checkout)))
            meshes[name] = Restarts(mesh)
        for number in range(options.rounds):
            down_s = rng.uniform(0.0, DOWN_S)
            for name in sorted(sides, reverse=bool(number % 2)):
                with meshes[name].load():
                    time.sleep(SETTLED_S)
                    ended_by = (signal.SIGKILL, signal.SIGTERM)[number // 2 % 2]
                    listens, answered = meshes[name].seconds(ended_by, down_s)
                found[name].append(answered)
                listening.append(listens)
    here, there = found.values()
    ratios = [a / b for a, b in zip(here, there, strict=True)]
    print(f"the server listens after {median(listening):.3f} s")
    for name, seconds in found.items():
        print(
            f"{name}: first answer after {median(seconds):.3f} s"
            f" ({min(seconds):.3f} to {max(seconds):.3f})"
        )
    print(f"ratio of the means {fmean(here) / fmean(there):.2f}, median ratio {median(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
