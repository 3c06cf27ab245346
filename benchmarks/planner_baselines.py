"""Autoscalers that the planner is compared with, by their published formulas and defaults.

Dynamo: the planner of release 1.6, easy thresholds and `sla` with both loops. llm-d: the token
velocity blueprint. KEDA: KV usage against a target with the behaviour of the horizontal pod
autoscaler. Each sees what its original sees; all get the first group only.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from kvmesh.bus.messages import (
    Decision,
    Instance,
    Load,
    Outcome,
    RouteEvent,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqWait,
)
from kvmesh.planner.capacity.step_times import FittedStepTimes, StepTimesFit
from kvmesh.simulator.autoscaler import FleetTarget

TICK_S = 5.0
THROUGHPUT_S = 180.0
STABILISE_S = 300.0  # of the horizontal pod autoscaler, before it scales down
SENSITIVITY = 0.8


@dataclass
class Baseline(ABC):
    """Collects what the baselines look at; `target` computes the wanted number of workers."""

    least: int
    most: int
    interval_s: float = TICK_S
    ready: dict[str, Instance] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    finished: deque[tuple[float, Outcome]] = field(default_factory=lambda: deque(maxlen=20_000))
    arrived: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=20_000))
    fit: StepTimesFit | None = None

    def joined(self, card: Instance, group: int, now: float) -> None:
        if group:
            return
        if card.draining:
            self.left(card)
            return
        self.ready[card.instance] = card
        if self.fit is None and card.capacity is not None and card.model is not None:
            size, capacity = card.model.block_size, card.capacity
            self.fit = StepTimesFit(size, capacity.max_batched_tokens, capacity.blocks * size)

    def left(self, card: Instance) -> None:
        self.ready.pop(card.instance, None)
        self.loads.pop(card.instance, None)

    def on_loads(self, loads: list[Load], now: float) -> None:
        for load in loads:
            if load.instance in self.ready:
                self.loads[load.instance] = load
                if self.fit is not None:
                    self.fit.add(load)

    def on_sequences(self, events: list[SeqEvent]) -> None:
        for event in events:
            if isinstance(event, SeqWait):
                self.waiting[event.request] = event.cost
            elif isinstance(event, SeqAdd | SeqFree):
                self.waiting.pop(event.request, None)

    def on_route(self, event: RouteEvent, now: float) -> None:
        if isinstance(event, Decision):
            self.arrived.append((now - event.wait_s, event.tokens))
        else:
            self.finished.append((now, event))

    def decide(self, now: float, wanted: Sequence[int]) -> FleetTarget | None:
        target = self.target(now, wanted[0])
        target = min(max(target, self.least), self.most)
        if target == wanted[0]:
            return None
        return FleetTarget([target, *wanted[1:]])

    @abstractmethod
    def target(self, now: float, wanted: int) -> int:
        """The workers to have, before bounds; `wanted` are those that run or start."""

    def kv_tokens(self, instance: str) -> tuple[float, float]:
        """KV tokens in use and in all on one engine."""
        card, load = self.ready[instance], self.loads[instance]
        assert card.model is not None
        size = card.model.block_size
        return load.active_blocks * size, load.total_blocks * size

    def means(self, now: float) -> tuple[float, float, float]:
        """Mean prompt and output of the last window, and the cached share."""
        recent = [o for at, o in self.finished if now - at <= THROUGHPUT_S]
        prompts = [tokens for at, tokens in self.arrived if now - at <= THROUGHPUT_S]
        if not recent or not prompts:
            return 0.0, 0.0, 0.0
        prompt = sum(prompts) / len(prompts)
        cached = sum(o.cached_tokens for o in recent) / len(recent)
        return prompt, sum(o.output_tokens for o in recent) / len(recent), cached / prompt


@dataclass
class DynamoThresholds(Baseline):
    """Dynamo's targets `throughput` and `latency` for aggregated engines: one replica at a time."""

    up: float = 1.0
    down: float = 0.6

    def target(self, now: float, wanted: int) -> int:
        if wanted != len(self.ready) or not self.loads:
            return wanted  # scaling in progress
        shares = []
        for instance, load in self.loads.items():
            used, total = self.kv_tokens(instance)
            shares.append((used + load.prefill_tokens) / total)
        if any(share > self.up for share in shares):
            return wanted + 1
        if all(share < self.down for share in shares):
            return wanted - 1
        return wanted


@dataclass
class DynamoSla(Baseline):
    """Dynamo's target `sla` for aggregated engines, load loop and throughput loop."""

    ttft_s: float = 2.0
    itl_s: float = 0.05
    floor: int = 1
    floored_at: float = 0.0

    def target(self, now: float, wanted: int) -> int:
        times = self.fit.fitted() if self.fit is not None else None
        if times is None or not self.loads:
            return wanted
        if now - self.floored_at >= THROUGHPUT_S:
            self.floored_at = now
            self.floor = self._throughput(now, times)
        if wanted != len(self.ready):
            return max(wanted, self.floor)
        return max(self._load(now, times, wanted), self.floor)

    def _estimate(
        self, now: float, times: FittedStepTimes, instance: str, factor: float
    ) -> tuple[float, float, float]:
        prompt, output, hit = self.means(now)
        load, card = self.loads[instance], self.ready[instance]
        assert card.capacity is not None
        used, _ = self.kv_tokens(instance)
        step = card.capacity.max_batched_tokens
        queued = load.prefill_tokens * factor + prompt * (1 - hit)
        kv = used * factor + output / 2
        decode = times.decode(1, kv)
        chunks, rest = divmod(int(queued), step)
        ttft = chunks * (times.prefill(step) + decode) + times.prefill(rest)
        own, left = divmod(int(prompt * (1 - hit)), step)
        return ttft, own * times.prefill(step) + times.prefill(left), decode

    def _load(self, now: float, times: FittedStepTimes, wanted: int) -> int:
        found = [self._estimate(now, times, instance, 1.0) for instance in self.loads]
        if all(ttft > self.ttft_s or itl > self.itl_s for ttft, _, itl in found):
            return wanted + 1
        if wanted <= 1:
            return wanted
        after = wanted / (wanted - 1)
        fits = True
        for instance in self.loads:
            ttft, own, itl = self._estimate(now, times, instance, after)
            used, total = self.kv_tokens(instance)
            fits &= ttft - own < (self.ttft_s - own) * SENSITIVITY
            fits &= itl < self.itl_s * SENSITIVITY and used * after < total
        return wanted - 1 if fits else wanted

    def _throughput(self, now: float, times: FittedStepTimes) -> int:
        prompt, output, hit = self.means(now)
        card = next(iter(self.ready.values()))
        if not prompt or card.capacity is None or card.model is None:
            return self.least
        demand = sum(now - at <= THROUGHPUT_S for at, _ in self.arrived) / min(now, THROUGHPUT_S)
        capacity = card.capacity
        uncached, context = prompt * (1 - min(hit, 0.95)), prompt + output / 2
        kv = capacity.blocks * card.model.block_size
        best = 0.0
        for batch in range(1, int(min(kv / context, capacity.max_sequences)) + 1):
            prefill = int(batch * uncached / output) if output else 0
            wall = times.prefill(prefill) + times.decode(batch, batch * context)
            if wall > self.itl_s:
                break
            best = max(best, batch / (max(output, 1.0) * wall))
        return ceil(demand / best) if best else self.most


@dataclass
class Stabilised(Baseline):
    """Scales down to the highest target of the last STABILISE_S seconds only."""

    interval_s: float = 15.0
    targets: deque[tuple[float, int]] = field(default_factory=deque)

    def target(self, now: float, wanted: int) -> int:
        if not self.loads:
            return wanted
        self.targets.append((now, self.desired(now, wanted)))
        while now - self.targets[0][0] > STABILISE_S:
            self.targets.popleft()
        desired = self.targets[-1][1]
        return desired if desired >= wanted else max(count for _, count in self.targets)

    @abstractmethod
    def desired(self, now: float, wanted: int) -> int:
        """The workers to have at this moment."""


@dataclass
class TokenVelocity(Stabilised):
    """llm-d's token velocity: the queue over velocity and time left, and KV usage over 0.8."""

    ttft_s: float = 2.0

    def desired(self, now: float, wanted: int) -> int:
        times = self.fit.fitted() if self.fit is not None else None
        if times is None:
            return wanted
        card = next(iter(self.ready.values()))
        assert card.capacity is not None
        step = card.capacity.max_batched_tokens
        velocity = step / times.prefill(step)
        prompt, _, hit = self.means(now)
        left = max(self.ttft_s - prompt * (1 - hit) / velocity, 0.1) * 0.65
        queued = sum(load.prefill_tokens for load in self.loads.values())
        queued += sum(self.waiting.values())
        usage = sum(used / total for used, total in map(self.kv_tokens, self.loads))
        return max(ceil(queued / velocity / left), ceil(usage / 0.8), 1)


@dataclass
class KvUsage(Stabilised):
    """A KEDA scaler on KV usage: workers in proportion to usage over a target of 0.7."""

    goal: float = 0.7

    def desired(self, now: float, wanted: int) -> int:
        shares = [used / total for used, total in map(self.kv_tokens, self.loads)]
        ratio = sum(shares) / len(shares) / self.goal
        if abs(ratio - 1) <= 0.1:
            return wanted
        return max(ceil(len(shares) * ratio), 1)
