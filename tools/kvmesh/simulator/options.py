"""Options of a simulation: fleet, network, faults and clients."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvmesh.frontend.sessions.speculation_gate import SpeculationMode
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.autoscaler import Autoscaler
from kvmesh.simulator.nodes.options import NodeOptions
from kvmesh.worker.engines.mock.core import CoreOptions

MIN_SPEED = 1e-6
Serves = Literal["aggregated", "prefill", "decode"]


class SimulationError(Exception):
    """Invalid options; the message names the option and the reason."""


@dataclass(frozen=True)
class WorkerOptions:
    """One group of identical workers; `serves` is their role in disaggregated serving.

    `cost` is that of a worker per hour, in any unit. With nodes, all run on node `node`; None
    spreads them. Beside the `count` that serve at the start, `parked` wait; then all workers of the
    group park before they serve. They hold no device until they are promoted. A worker that
    `sleeps` may wait in the same way after it has served.
    """

    count: int = 4
    core: CoreOptions = field(default_factory=CoreOptions)
    serves: Serves = "aggregated"
    cost: float = 1.0
    node: int | None = None
    parked: int = 0
    sleeps: bool = False


@dataclass(frozen=True)
class Fault:
    """A change of the fleet at `time` seconds: a worker dies, drains and leaves, or joins."""

    time: float
    kind: Literal["die", "leave", "join"]
    worker: int = 0


@dataclass(frozen=True)
class Network:
    """Delays in seconds; `event_loss` is the share of KV event batches that are lost.

    `overhead` is the time that the path around the engine adds before the first token.
    """

    overhead: float = 0.003
    kv_events: float = 0.003
    replicas: float = 0.002
    loads: float = 0.25
    event_loss: float = 0.0
    dump: float = 0.05


@dataclass(frozen=True)
class SimulationOptions:
    """A scenario. `speed` divides the workload's times; `deadline_s` bounds queueing.

    Frontends have up to `speculative_tokens` of the next prompt computed after an answer, by
    `speculative_prefill`; with "hinted", every request asks for it. With `tool_events`, harnesses
    report their tools.

    `horizon_s` bounds a batch of decode steps; it affects the simulator's speed, not its results.
    The run ends once `ended_share` of the rounds have ended.
    `autoscaler` makes the one that changes the fleet; a new worker takes `startup_s` to start, the
    last `promotion_s` of it, a quarter by default, after its promotion if it is parked.
    With `nodes`, the workers of a node share a kvbm.
    """

    router: RouterSettings = field(default_factory=RouterSettings)
    workers: tuple[WorkerOptions, ...] = (WorkerOptions(),)
    replicas: int = 1
    network: Network = field(default_factory=Network)
    faults: tuple[Fault, ...] = ()
    speed: float = 1.0
    seed: int = 0
    deadline_s: float = 600.0
    speculative_prefill: SpeculationMode = "off"
    speculative_tokens: int = 131_072
    tool_events: bool = False
    horizon_s: float = 0.5
    ended_share: float = 1.0
    autoscaler: Callable[[], Autoscaler] | None = None
    startup_s: float = 60.0
    promotion_s: float | None = None
    nodes: NodeOptions | None = None

    @property
    def promotion(self) -> float:
        """Seconds from a promotion until the worker serves."""
        return self.startup_s / 4 if self.promotion_s is None else self.promotion_s

    @property
    def block_size(self) -> int:
        return self.workers[0].core.limits.block_size

    def check(self) -> None:
        """Raise SimulationError for an invalid scenario."""
        sizes = {group.core.limits.block_size for group in self.workers}
        if len(sizes) != 1:
            raise SimulationError(f"workers must use one block size, not {sorted(sizes)}")
        if not 0 <= self.promotion <= self.startup_s:
            raise SimulationError("a promotion takes at most as long as a start, and at least 0 s")
        if self.replicas < 1 or sum(group.count for group in self.workers) < 1:
            raise SimulationError("at least one router and one worker are required")
        if all(group.serves == "prefill" for group in self.workers if group.count):
            raise SimulationError("at least one worker must decode")
        if not MIN_SPEED <= self.speed < math.inf:
            raise SimulationError(f"speed must be at least {MIN_SPEED:g} and finite")
        self._check_network()
        self._check_faults()
        self._check_nodes()

    def _check_nodes(self) -> None:
        nodes = self.nodes
        for group in self.workers:
            if group.node is not None and (nodes is None or group.node >= nodes.count):
                raise SimulationError(f"there is no node {group.node}")
            if nodes is not None and (group.core.tiers.host_blocks or group.core.tiers.disk_blocks):
                raise SimulationError("nodes replace the mock's own tiers: leave those out")
        if nodes is not None and self.block_size * nodes.bytes_per_token > nodes.host_bytes:
            raise SimulationError("the memory of a node does not hold one block")

    def _check_network(self) -> None:
        network = self.network
        if not 0 <= network.event_loss < 1:
            raise SimulationError("event loss must be at least 0 and below 1")
        for name, delay in (("event", network.kv_events), ("sync", network.replicas)):
            if not 0 <= delay < math.inf:
                raise SimulationError(f"{name} delay must be at least 0 and finite")

    def _check_faults(self) -> None:
        present = set(range(sum(group.count for group in self.workers)))
        for fault in sorted(self.faults, key=lambda fault: fault.time):
            if not 0 <= fault.time < math.inf:
                raise SimulationError(f"fault at {fault.time} s: the time must be finite and >= 0")
            if (fault.worker in present) is (fault.kind == "join"):
                state = "has joined already" if fault.kind == "join" else "does not exist"
                attempt = f"worker {fault.worker} cannot {fault.kind} at {fault.time:g} s"
                raise SimulationError(f"{attempt}: it {state}")
            if fault.kind == "join":
                present.add(fault.worker)
            else:
                present.remove(fault.worker)
