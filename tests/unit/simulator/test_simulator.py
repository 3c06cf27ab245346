"""The simulator is deterministic, conserves tokens and requests, and mirrors its caches."""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.bus.messages import RankKey, Stored
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import (
    Fault,
    Network,
    SimulationError,
    SimulationOptions,
    WorkerOptions,
)
from kvmesh.simulator.prompts import SimulatedPrompts
from kvmesh.simulator.report.figures import Figures, figures
from kvmesh.simulator.report.page import page
from kvmesh.simulator.report.perfetto import perfetto
from kvmesh.simulator.virtual_clock import VirtualClock
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.worker.engines.mock.pace import PaceOptions
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

SIZE = 16


def conversations(sessions: int, turns: int, seed: int = 0, shared: int = 320) -> Workload:
    """Closed-loop sessions over one shared system prompt, each turn extending the one before."""
    rng = Random(seed)
    tree = Tree()
    system = tree.fork()
    rounds: list[Round] = []
    for session in range(sessions):
        branch = tree.fork(system, shared)
        tokens, before = shared, -1
        for _ in range(turns):
            tokens += rng.randrange(20, 200)
            output = rng.randrange(1, 60)
            rounds.append(
                Round(
                    session=session,
                    branch=branch,
                    output_branch=branch,
                    input_tokens=tokens,
                    output_tokens=output,
                    at_s=rng.random() * (2.0 if before < 0 else 0.5),
                    after=() if before < 0 else (before,),
                )
            )
            before = len(rounds) - 1
            tokens += output
    names = [Session(name=f"s{number}") for number in range(sessions)]
    return Workload(tree=tree, sessions=names, rounds=rounds)


def options(
    policy: str = "kv", blocks: int = 1024, workers: int = 3, **more: object
) -> SimulationOptions:
    core = CoreOptions(blocks=blocks, limits=SchedulerLimits(block_size=SIZE, max_sequences=16))
    base = SimulationOptions(
        router=RouterSettings(policy=policy), workers=(WorkerOptions(workers, core),), seed=7
    )
    return replace(base, **more)  # type: ignore[arg-type]


def run(workload: Workload, chosen: SimulationOptions) -> tuple[Simulation, Figures]:
    simulation = Simulation(workload, chosen)
    simulation.run()
    return simulation, figures(simulation)


def test_simultaneous_actions_run_in_scheduling_order() -> None:
    clock = VirtualClock()
    seen: list[str] = []
    clock.at(2, lambda: seen.append("later"))
    clock.at(1, lambda: seen.append("first"))
    clock.at(1, lambda: clock.at(0, lambda: seen.append("not before now")))
    clock.run()
    assert seen == ["first", "not before now", "later"]
    assert clock.now == 2


def test_planned_actions_run_in_scheduling_order() -> None:
    clock = VirtualClock()
    seen: list[str] = []
    clock.at(2, lambda: seen.append("before"))
    clock.plan([(time, partial(seen.append, f"planned {time}")) for time in (3, 1, 2, 2)])
    clock.at(2, lambda: seen.append("after"))
    clock.run()
    assert seen == ["planned 1", "before", "planned 2", "planned 2", "after", "planned 3"]


@given(
    forks=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 90)), max_size=9),
    tokens=st.integers(1, 120),
    size=st.sampled_from([1, 7, 16]),
)
def test_only_equal_content_has_equal_hashes(
    forks: list[tuple[int, int]], tokens: int, size: int
) -> None:
    tree = Tree()
    tree.fork()
    for parent, start in forks:
        tree.fork(parent % len(tree), start)
    workload = Workload(tree=tree, sessions=[], rounds=[])
    prompts = SimulatedPrompts(workload, "m", size)
    meant: dict[int, int] = {}
    for branch in range(len(tree)):
        round_ = Round(
            session=0, branch=branch, output_branch=branch, input_tokens=tokens, output_tokens=1
        )
        hashes = prompts.hashes(round_)
        blocks = tree.blocks(branch, tokens + 1, size).tolist()
        for packed in (hashes.local, hashes.sequence_hashes):
            names = np.frombuffer(packed, np.uint64).tolist()
            assert [meant.setdefault(n, b) for n, b in zip(names, blocks, strict=True)] == blocks
    assert len(meant) == 2 * len(set(meant.values()))


def test_engines_know_the_sessions_of_their_blocks() -> None:
    simulation, _ = run(conversations(5, 3), options())
    caches = [worker.core.blocks.retention for worker in simulation.workers.values()]
    assert sum(cache.state(0, simulation.clock.now).sessions for cache in caches) >= 5


def test_blocks_of_ended_sessions_only_are_released() -> None:
    workload = conversations(5, 3)
    silent, _ = run(workload, options())
    workload.sessions = [msgspec.structs.replace(s, ends=True) for s in workload.sessions]
    publishing, _ = run(workload, options())
    _check_caches(publishing)
    held, left = (
        sum(worker.core.blocks.cached for worker in simulation.workers.values())
        for simulation in (silent, publishing)
    )
    prefix = 320 // publishing.options.block_size  # which all sessions have begun with
    assert 0 < left <= prefix * len(publishing.workers) < held


@pytest.mark.parametrize("policy", ["kv", "round-robin", "random", "power-of-two", "session"])
def test_two_runs_with_one_seed_are_identical(policy: str) -> None:
    workload = conversations(12, 5)
    first, second = (run(workload, options(policy))[1] for _ in range(2))
    assert first == second


@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(0, 1000),
    st.integers(60, 600),
    st.integers(1, 4),
    st.sampled_from(["kv", "round-robin", "random", "least-loaded"]),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_tokens_and_requests_are_conserved(
    sessions: int, turns: int, seed: int, blocks: int, workers: int, policy: str, ends: bool
) -> None:
    workload = conversations(sessions, turns, seed)
    workload.sessions = [msgspec.structs.replace(s, ends=ends) for s in workload.sessions]
    fits = max(r.input_tokens + r.output_tokens for r in workload.rounds) // SIZE + 2
    chosen = options(policy, max(blocks, fits), workers, network=Network(kv_events=0.0))
    simulation, result = run(workload, chosen)
    records = simulation.records
    assert result.failed == 0
    assert not np.isnan(records.column("ended")).any()
    assert not np.isnan(records.column("first_token")).any()
    assert sum(w.cached_share * w.prompt_tokens for w in result.workers) == pytest.approx(
        sum(records.cached)
    )
    assert records.output == [r.output_tokens for r in workload.rounds]
    assert sum(w.requests for w in result.workers) == len(workload)
    assert sum(w.output_tokens for w in result.workers) == sum(records.output)
    assert all(c <= r.input_tokens for c, r in zip(records.cached, workload.rounds, strict=True))
    assert all(c <= i for c, i in zip(records.cached, records.ideal, strict=True))
    assert sum(msgspec.structs.astuple(result.cache.lost)) == result.cache.recomputed_tokens
    _check_caches(simulation)


FLEETS: list[list[Literal["aggregated", "prefill", "decode"]]] = [
    ["aggregated", "aggregated"],
    ["decode", "prefill"],
    ["aggregated", "prefill"],
]


@given(
    seed=st.integers(0, 1000),
    policy=st.sampled_from(["kv", "random", "session"]),
    serves=st.sampled_from(FLEETS),
    replicas=st.integers(1, 3),
    event_delay=st.sampled_from([0.0, 1.0]),
    spare=st.integers(0, 200),
    changes=st.lists(st.tuples(st.floats(0, 3), st.booleans(), st.integers(1, 3)), max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_faults_lose_no_request(
    seed: int,
    policy: str,
    serves: list[Literal["aggregated", "prefill", "decode"]],
    replicas: int,
    event_delay: float,
    spare: int,
    changes: list[tuple[float, bool, int]],
) -> None:
    workload = conversations(8, 4, seed, shared=640)
    blocks = max(r.input_tokens + r.output_tokens for r in workload.rounds) // SIZE + 2 + spare
    core = CoreOptions(blocks=blocks, limits=SchedulerLimits(block_size=SIZE, max_sequences=4))
    fleet = tuple(WorkerOptions(2, core, kind) for kind in serves)
    network = Network(kv_events=event_delay)
    chosen = options(policy, replicas=replicas, network=network, faults=faults(changes))
    simulation, result = run(workload, replace(chosen, workers=fleet))
    records = simulation.records
    assert result.failed == 0
    assert records.output == [r.output_tokens for r in workload.rounds]
    times = [records.column(name) for name in ("arrived", "placed", "first_token", "ended")]
    assert all((one <= other).all() for one, other in pairwise(times))
    assert all(c <= i for c, i in zip(records.cached, records.ideal, strict=True))
    assert sum(msgspec.structs.astuple(result.cache.lost)) == result.cache.recomputed_tokens
    assert all(length >= 0 for *_, length in slices(simulation))
    assert not any(worker.core.busy for worker in simulation.workers.values())
    _check_caches(simulation)


def faults(changes: list[tuple[float, bool, int]]) -> tuple[Fault, ...]:
    """Faults of workers 1 to 3, leaving and joining in turn; worker 0 stays."""
    away: set[int] = set()
    made: list[Fault] = []
    for time, dies, worker in sorted(changes):
        kind: Literal["die", "leave", "join"] = "die" if dies else "leave"
        if worker in away:
            kind = "join"
        away ^= {worker}
        made.append(Fault(time, kind, worker))
    return tuple(made)


def _check_caches(simulation: Simulation) -> None:
    """Assert that the index holds exactly the blocks of each worker's cache."""
    for worker in simulation.workers.values():
        held = worker.core.blocks
        assert held.cached + held.active <= held.capacity
        rank = simulation.index.rank_states.rank(worker.instance, 0)
        in_index = 0
        if rank is not None:
            in_index = sum(
                len(s.engine) // 8 for s in simulation.index.rank_states.index.dump(rank.slot)
            )
        in_cache = sum(len(e.engine) // 8 for e in worker.core.dump() if isinstance(e, Stored))
        assert in_index == in_cache


def lost(workload: Workload, chosen: SimulationOptions) -> dict[str, int]:
    """Lost tokens by cause, without zeros."""
    parts = msgspec.structs.asdict(run(workload, chosen)[1].cache.lost)
    return {name: tokens for name, tokens in parts.items() if tokens}


def test_the_report_divides_lost_hits_by_cause() -> None:
    workload = conversations(4, 4)
    assert set(lost(workload, options("round-robin"))) >= {"elsewhere"}
    longest = max(r.input_tokens + r.output_tokens for r in workload.rounds)
    short = options(workers=1, blocks=longest // SIZE + 2)
    assert set(lost(workload, short)) <= {"evicted", "dropped", "ends", "unfinished"}
    assert lost(workload, short)["evicted"] > 0


def test_a_prompt_still_being_computed_is_no_hit() -> None:
    tree = Tree()
    branch = tree.fork()
    twin = Round(
        session=0, branch=branch, output_branch=branch, input_tokens=SIZE * 9, output_tokens=1
    )
    workload = Workload(tree=tree, sessions=[Session(name="s")], rounds=[twin, twin])
    blind = options("round-robin", workers=2)
    assert lost(workload, blind) == {"unfinished": SIZE * 8, "ends": SIZE}


def test_cache_aware_routing_finds_more_than_round_robin() -> None:
    workload = conversations(24, 8)
    aware = run(workload, options("kv"))[1]
    blind = run(workload, options("round-robin"))[1]
    assert aware.cache.cached_share > blind.cache.cached_share
    assert aware.cache.share_of_ideal > 0.7


def test_a_dead_worker_loses_its_blocks_but_no_request() -> None:
    workload = conversations(16, 6)
    faults = (Fault(1.2, "die", 1), Fault(1.5, "join", 1), Fault(2.0, "leave", 0))
    simulation, result = run(workload, options(faults=faults))
    assert result.failed == 0
    assert result.migrations > 0
    assert simulation.records.output == [r.output_tokens for r in workload.rounds]
    assert [w.name for w in result.workers].count("worker-1") == 2
    dead = RankKey("worker-1.0", 0)
    assert dead not in simulation.index.rank_states.keys


def test_a_worker_leaves_after_its_running_step() -> None:
    tree = Tree()
    branches = [tree.fork() for _ in range(2)]
    alike = [
        Round(session=0, branch=b, output_branch=b, input_tokens=100, output_tokens=1)
        for b in branches
    ]
    workload = Workload(tree=tree, sessions=[Session(name="s")], rounds=alike)
    leaves = (Fault(0.002, "leave", 0),)
    simulation, result = run(workload, options("round-robin", workers=2, faults=leaves))
    assert result.failed == result.migrations == 0
    assert [w.requests for w in result.workers] == [1, 1]
    assert list(simulation.workers) == ["worker-1.0"]
    assert RankKey("worker-0.0", 0) not in simulation.index.rank_states.keys


def test_lost_events_are_healed_by_dumps() -> None:
    workload = conversations(16, 8)
    lossy = run(workload, options(network=Network(event_loss=0.2)))
    assert lossy[0].index.rank_states.counts.gaps > 0
    assert lossy[1].failed == 0
    assert lossy[1].cache.cached_share > 0


def test_prefill_workers_hand_prompts_off() -> None:
    workload = conversations(10, 4, shared=3200)
    core = CoreOptions(blocks=4096, limits=SchedulerLimits(block_size=SIZE, max_sequences=16))
    fleet = (WorkerOptions(1, core, "prefill"), WorkerOptions(2, core, "decode"))
    simulation, result = run(workload, replace(options(), workers=fleet))
    assert result.failed == 0
    assert simulation.records.output == [r.output_tokens for r in workload.rounds]
    prefill, *decode = result.workers
    assert prefill.requests > 0
    assert prefill.output_tokens == prefill.requests, "one token for each prompt"
    assert sum(w.requests for w in decode) == len(workload)


def test_different_engines_share_a_workload() -> None:
    slow, fast = (replace(options().workers[0], count=1, core=c) for c in two_speeds())
    _, result = run(conversations(24, 6), replace(options("least-loaded"), workers=(slow, fast)))
    assert result.failed == 0
    assert result.workers[1].requests > result.workers[0].requests


def two_speeds() -> tuple[CoreOptions, CoreOptions]:
    core = CoreOptions(blocks=1024, limits=SchedulerLimits(block_size=SIZE, max_sequences=16))
    return replace(core, speedup=0.2), replace(core, speedup=4.0)


def test_replicas_share_the_load() -> None:
    workload = conversations(30, 4)
    one = run(workload, options())[1]
    three = run(workload, options(replicas=3))[1]
    assert three.failed == 0
    assert three.cache.cached_share > one.cache.cached_share * 0.9


def test_a_client_that_disconnects_frees_the_engine() -> None:
    tree = Tree()
    branch = tree.fork()
    leaver = Round(
        session=0,
        branch=branch,
        output_branch=branch,
        input_tokens=64,
        output_tokens=500,
        abort_after=10,
    )
    workload = Workload(tree=tree, sessions=[Session(name="s")], rounds=[leaver])
    simulation, result = run(workload, options(workers=1))
    assert 10 <= simulation.records.output[0] < 500
    assert result.failed == 0
    assert all(not worker.core.busy for worker in simulation.workers.values())


def test_prompts_that_never_fit_are_errors_outside_the_shares() -> None:
    workload = conversations(2, 2)
    fitting = run(workload, options())[1]
    endless = Round(session=0, branch=0, output_branch=0, input_tokens=10**8, output_tokens=5)
    workload.rounds += [endless, endless]
    result = run(workload, options())[1]
    assert result.failed == 2
    assert result.errors == {"does not fit into 1024 blocks": 2}
    assert result.cache == fitting.cache


def test_only_the_larger_engine_has_the_capacity() -> None:
    small, large = options(blocks=20, workers=1).workers + options(workers=1).workers
    both = replace(options("round-robin"), workers=(small, large))
    result = run(conversations(1, 8), both)[1]
    assert result.errors == {"does not fit into 20 blocks": result.failed}
    assert 0 < result.failed < 8


def test_a_run_that_ends_at_once_has_the_rate_of_the_whole() -> None:
    tree = Tree()
    branches = [tree.fork() for _ in range(4)]
    alike = [
        Round(session=0, branch=b, output_branch=b, input_tokens=100, output_tokens=5)
        for b in branches
    ]
    workload = Workload(tree=tree, sessions=[Session(name="s")], rounds=alike)
    result = run(workload, options("round-robin", workers=4))[1]
    assert result.steady_tokens_per_s == result.output_tokens_per_s


def slices(simulation: Simulation) -> list[tuple[str, int, float]]:
    """Name, process and length of each slice of the trace."""
    events = json.loads(perfetto(simulation))["traceEvents"]
    named = {e["pid"] for e in events if e["ph"] == "M"}
    assert {e["pid"] for e in events} == named
    begun = {(e["id"], e["name"]): e for e in events if e["ph"] == "b"}
    ended = {(e["id"], e["name"]): e for e in events if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert len(begun) == sum(e["ph"] == "b" for e in events)
    return [(b["name"], b["pid"], ended[key]["ts"] - b["ts"]) for key, b in begun.items()]


def test_the_trace_has_each_request_on_its_workers() -> None:
    workload = conversations(10, 4, shared=3200)
    core = CoreOptions(blocks=4096, limits=SchedulerLimits(block_size=SIZE, max_sequences=16))
    fleet = (WorkerOptions(1, core, "prefill"), WorkerOptions(2, core, "decode"))
    simulation, result = run(workload, replace(options(), workers=fleet))
    found = slices(simulation)
    prefills = sum(name == "prefill" and place == 0 for name, place, _ in found)
    assert prefills == result.workers[0].requests > 0
    assert {place for name, place, _ in found if name == "decode"} <= {1, 2}


def test_the_trace_separates_incarnations() -> None:
    faults = (Fault(1.2, "die", 1), Fault(1.3, "join", 7), Fault(1.4, "join", 1))
    simulation, result = run(conversations(16, 6), options(faults=faults))
    assert result.migrations > 0
    found = slices(simulation)
    assert min(length for *_, length in found) >= 0
    assert {place for _, place, _ in found} == set(range(5))


def test_invalid_scenarios_are_rejected() -> None:
    workload = conversations(1, 1)
    for bad in (options(workers=0), options(replicas=0), options(speed=0.0)):
        with pytest.raises(SimulationError):
            Simulation(workload, bad)
    with pytest.raises(SimulationError, match="event loss"):
        Simulation(workload, options(network=Network(event_loss=1.0)))


def test_reports_are_complete(tmp_path: Path) -> None:
    runs = [run(conversations(6, 4), options(policy)) for policy in ("kv", "random")]
    text = page("a <title>", runs)
    assert "a &lt;title&gt;" in text
    assert text.count("<svg") == 4
    assert "workers</h3>" not in text
    many = page("many", [run(conversations(6, 4), options(workers=9))])
    assert "kv, the first 8 of 9 workers</h3>" in many
    assert not re.search(r"(src|href)=", text)
    trace = json.loads(perfetto(runs[0][0]))
    begun = [e for e in trace["traceEvents"] if e["ph"] == "b"]
    assert len(begun) == 2 * 24
    assert msgspec.json.decode(msgspec.json.encode(runs[0][1]), type=Figures) == runs[0][1]


def test_engines_of_unlike_speed_take_as_long_as_their_group_says() -> None:
    workload = AgentGenerator(load_profile("demo"), 0).workload(4)
    slow = PaceOptions(slow_prefill=3.0, slow_decode=3.0)
    times = []
    for pace in (PaceOptions(), slow):
        group = WorkerOptions(1, CoreOptions(pace=pace))
        simulation = Simulation(workload, SimulationOptions(workers=(group,)))
        simulation.run()
        [record] = simulation.worker_records.values()
        times.append(record.busy_s / record.output_tokens)
    assert times[1] > 2 * times[0]
