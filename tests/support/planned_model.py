"""A model under a planner's core: synthetic workers, requests and a place that starts workers."""

from itertools import pairwise
from random import Random

from kvmesh.bus.messages import (
    Candidate,
    Capacity,
    Decision,
    Hints,
    Instance,
    Load,
    ModelCard,
    Outcome,
    Role,
    SeqAdd,
    SeqFree,
    SeqWait,
)
from kvmesh.planner.capacity.step_times import FittedStepTimes
from kvmesh.planner.core.groups.candidates import Plan
from kvmesh.planner.core.groups.role_switches import PlannedSwitch
from kvmesh.planner.core.options import PlanOptions
from kvmesh.planner.core.planner import PlannerCore
from kvmesh.planner.core.pools import parse_pools
from kvmesh.planner.profiles import with_step_profiles

TIMES = FittedStepTimes(step=0.02, prefill_step=0.02, token=2e-4, kv_token=1e-7)
START = 1_700_000_000.0
BLOCK = 64


def worker_card(
    instance: str, serves: str = "aggregated", draining: bool = False, model: str = "m"
) -> Instance:
    return Instance(
        instance=instance,
        role=Role.WORKER,
        name=instance,
        version="",
        started=0.0,
        serves=serves,
        draining=draining,
        model=ModelCard(name=model, context=0, block_size=BLOCK, files=""),
        capacity=Capacity(blocks=16_384, max_sequences=256, max_batched_tokens=8192),
    )


class LinearEngine:
    """Load reports of an engine with linear step times, under a mixed load of its own."""

    def __init__(self, instance: str, times: FittedStepTimes = TIMES, seed: int = 0) -> None:
        self._rng = Random(f"{instance} {seed}")
        self._times = times
        self._instance = instance
        self._steps = self._prefills = self._tokens = 0
        self._busy = 0.0

    def load(self, **changes: int) -> Load:
        """The next report, after some steps with a constant batch."""
        rng = self._rng
        steps, kv = rng.randrange(5, 40), rng.randrange(1000, 400_000)
        prefills = rng.randrange(0, 5)
        tokens = sum(rng.randrange(64, 8193) for _ in range(prefills))
        self._busy += self._times.step * steps + self._times.kv_token * kv * steps
        self._busy += self._times.prefill_step * prefills + self._times.token * tokens
        self._steps += steps
        self._prefills += prefills
        self._tokens += tokens
        values: dict[str, int] = {
            "running": 4,
            "waiting": 0,
            "active_blocks": kv // BLOCK,
            "prefill_tokens": 0,
            "prefill_steps": self._prefills,
            "decoding": 4,
            "decode_tokens": kv,
        }
        return Load(
            instance=self._instance,
            rank=0,
            cached_blocks=0,
            total_blocks=16_384,
            steps=self._steps,
            prompt_tokens=0,
            cached_tokens=0,
            output_tokens=0,
            requests=0,
            busy_s=self._busy,
            computed_tokens=self._tokens,
            **{**values, **changes},
        )


def decision(
    request: str,
    now: float,
    tokens: int = 4096,
    overlap: int = 0,
    request_class: str | None = None,
    wait_s: float = 0.0,
    worker: str = "w-0",
) -> Decision:
    chosen = Candidate(
        instance=worker, worker=worker, rank=0, overlap=[overlap], prefill=0, decode=0, requests=0,
        cost=0,
    )  # fmt: skip
    return Decision(
        request=request,
        model="m",
        time=now,
        router="r",
        policy="kv",
        chosen=chosen,
        candidates=[],
        tokens=tokens,
        sequence_hashes=b"",
        max_tokens=1000,
        block_size=BLOCK,
        hints=Hints(fair_class=request_class),
        wait_s=wait_s,
    )


def outcome(
    request: str, now: float, output: int = 100, ttft: float = 0.5, cached: int = 0,
    worker: str = "w-0",
) -> Outcome:  # fmt: skip
    return Outcome(
        request=request, instance=worker, time=now, cached_tokens=cached, output_tokens=output,
        ttft_s=ttft, total_s=ttft + 0.02 * output, finish="stop",
    )  # fmt: skip


def wait(request: str, now: float, cost: int = 4096, deadline_s: float = 600.0) -> SeqWait:
    return SeqWait(
        request=request, router="r", lane="", tier=0, fair_class="", key=now, cost=cost,
        arrived=now, deadline=now + deadline_s,
    )  # fmt: skip


class PlannedModel:
    """Passes messages to a core and carries its plans out; workers take `startup_s` to start.

    Pools in `broken` never get a worker ready. `plans` are all plans with their times. Workers in
    `frozen` do not change their roles.
    """

    def __init__(
        self, pools: str = "workers:max=16", startup_s: float = 30.0, seed: int = 1,
        times: dict[str, FittedStepTimes] | None = None, **options: object,
    ) -> None:  # fmt: skip
        self.pools = with_step_profiles(parse_pools([pools]))
        self.core = PlannerCore(PlanOptions(startup_s=startup_s, **options), self.pools)  # type: ignore[arg-type]
        self.now = START
        self.plans: list[tuple[float, Plan]] = []
        self.broken: set[str] = set()
        self.frozen: set[str] = set()
        self.workers: dict[str, list[str]] = {pool.name: [] for pool in self.pools}
        self.wanted: dict[str, int] = dict.fromkeys(self.workers, 0)
        self._times = times or {}
        self._startup_s = startup_s
        self._starting: list[tuple[float, str]] = []
        self._engines: dict[str, LinearEngine] = {}
        self._rng = Random(seed)
        self._number = self._requests = 0

    def start(self, pool: str, count: int) -> None:
        """Have ready workers from the beginning, with learned step times."""
        for _ in range(count):
            self._ready(pool)
        self.wanted[pool] = len(self.workers[pool])
        for _ in range(20):
            self.loads()

    def loads(self, **changes: int) -> None:
        for engine in self._engines.values():
            self.core.on_load(engine.load(**changes))

    def request(self, tokens: int = 4096, at: float | None = None, **more: object) -> str:
        """One request, placed at once and ended."""
        self._requests += 1
        name, at = f"r-{self._requests}", self.now if at is None else at
        self.core.on_route(decision(name, at, tokens, **more), at)  # type: ignore[arg-type]
        self.core.on_route(outcome(name, at, cached=64), at)
        return name

    def decide(self) -> Plan:
        self.core.observe_wanted(self.wanted, self.now)
        plan = self.core.decide(self.now)
        self.plans.append((self.now, plan))
        for switch in plan.switches:
            self._switch(switch)
        for pool, count in plan.wanted.items():
            added = count - self.wanted[pool]
            self._starting += [(self.now + self._startup_s, pool)] * max(added, 0)
            for _ in range(max(-added, 0)):
                self._stop(pool, plan.stop)
        self.wanted = dict(plan.wanted)
        return plan

    def run(self, seconds: float, rate: float = 0.0, tokens: int = 4096, **more: object) -> None:
        """Poisson arrivals at `rate` per second, a load report per 5 s, a plan per interval."""
        end = self.now + seconds
        due = self.now + self._rng.expovariate(rate) if rate else end
        while self.now < end:
            step = self.now + self.core.options.interval_s
            while due < step and rate:
                self.request(tokens, due, **more)
                due += self._rng.expovariate(rate)
            self.now = step
            for at, pool in self._starting[:]:
                if at <= step and pool not in self.broken:
                    self._starting.remove((at, pool))
                    self._ready(pool)
            self.loads()
            self.decide()

    @property
    def sizes(self) -> list[int]:
        """Workers wanted in all pools, by plan."""
        return [sum(plan.wanted.values()) for _, plan in self.plans]

    def changes(self, since: float = 0.0) -> int:
        """Plans that changed a number, from `since` on."""
        wanted = [plan.wanted for at, plan in self.plans if at >= since]
        return sum(a != b for a, b in pairwise(wanted))

    def _ready(self, pool: str) -> None:
        serves = next(each.serves for each in self.pools if each.name == pool)
        instance = f"w-{self._number}"
        self._number += 1
        self.workers[pool].append(instance)
        self._engines[instance] = LinearEngine(instance, self._times.get(pool, TIMES))
        self.core.joined(worker_card(instance, serves), pool, self.now)

    def _switch(self, switch: PlannedSwitch) -> None:
        """Change the role of a worker; its place counts it in its new pool at once."""
        self.wanted[switch.source] -= 1
        self.wanted[switch.target] += 1
        if switch.instance not in self.frozen:
            self.workers[switch.source].remove(switch.instance)
            self.workers[switch.target].append(switch.instance)
            card = worker_card(switch.instance, switch.serves)
            self.core.joined(card, switch.target, self.now)

    def _stop(self, pool: str, stop: list[str]) -> None:
        starting = [each for each in self._starting if each[1] == pool]
        if starting:
            self._starting.remove(starting[-1])
            return
        ready = self.workers[pool]
        chosen = next((each for each in stop if each in ready), ready[-1] if ready else None)
        if chosen is not None:
            ready.remove(chosen)
            self.end(chosen)

    def end(self, instance: str) -> None:
        del self._engines[instance]
        self.core.left(instance)


def placed(request: str) -> SeqAdd:
    return SeqAdd(
        request=request, instance="w-0", rank=0, sequence_hashes=b"", tokens=4096, overlap=0,
        osl=100, time=START,
    )  # fmt: skip


def freed(request: str) -> SeqFree:
    return SeqFree(request)
