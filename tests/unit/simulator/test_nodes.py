"""Nodes of the simulator run the live block manager: its workers share blocks, over links."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.bus.messages import Decision, RouteEvent
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE
from kvmesh.settings.schema import KvbmSettings, MockSettings, RouterSettings, WorkerSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.nodes.options import NodeOptions, node_options
from kvmesh.simulator.options import Fault, SimulationError, SimulationOptions, WorkerOptions
from kvmesh.simulator.report.conditions import conditions
from kvmesh.simulator.report.figures import Figures, figures
from kvmesh.simulator.report.tables import rows
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.enginecore.simulated_tiers import TierOptions
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

SIZE = 16
TOKEN_BYTES = 65536  # a block is 1 MiB
CORE = CoreOptions(blocks=512, limits=SchedulerLimits(block_size=SIZE, max_sequences=16))


def nodes(count: int = 1, **settings: object) -> NodeOptions:
    kvbm = KvbmSettings(**{"host_bytes": 4 << 30, **settings})  # type: ignore[arg-type]
    mock = MockSettings(kv_bytes_per_token=TOKEN_BYTES)
    return node_options(count, kvbm, mock, WorkerSettings(), store_bps=5e9)


def options(
    at: NodeOptions | None, workers: int = 2, policy: str = "round-robin", core: CoreOptions = CORE
) -> SimulationOptions:
    return SimulationOptions(
        router=RouterSettings(policy=policy), workers=(WorkerOptions(workers, core),), nodes=at
    )


def prompts(
    *times: float, tokens: int = 4096, own: int = 64, output: int = 20, ends: bool = False
) -> Workload:
    """Requests at these times, with one common prefix and `own` tokens of their own.

    Each is a session, whose end its client marks if `ends`.
    """
    tree = Tree()
    shared = tree.fork()
    rounds = []
    for number, at in enumerate(times):
        branch = tree.fork(shared, tokens)
        rounds.append(
            Round(
                session=number,
                branch=branch,
                output_branch=branch,
                input_tokens=tokens + own,
                output_tokens=output,
                at_s=at,
            )
        )
    names = [Session(name=f"s{number}", ends=ends) for number in range(len(times))]
    return Workload(tree=tree, sessions=names, rounds=rounds)


def cycles(prompts: int, passes: int, tokens: int = 4096, apart: float = 1.0) -> Workload:
    """The same prompts over and over, one at a time, in sessions without an end until then."""
    tree = Tree()
    branches = [tree.fork() for _ in range(prompts)]
    rounds = [
        Round(
            session=prompt,
            branch=branches[prompt],
            output_branch=branches[prompt],
            input_tokens=tokens,
            output_tokens=4,
            at_s=(number * prompts + prompt) * apart,
        )
        for number in range(passes)
        for prompt in range(prompts)
    ]
    names = [Session(name=f"s{number}") for number in range(prompts)]
    return Workload(tree=tree, sessions=names, rounds=rounds)


def run(workload: Workload, chosen: SimulationOptions) -> tuple[Simulation, Figures]:
    simulation = Simulation(workload, chosen)
    simulation.run()
    result = figures(simulation)
    assert result.failed == 0
    if simulation.nodes is not None:
        for node in simulation.nodes.nodes:
            assert not node.manager.onboarding.tickets
    return simulation, result


def test_a_worker_loads_what_another_of_its_node_has_computed() -> None:
    _, alone = run(prompts(0.0, 5.0), options(None))
    _, shared = run(prompts(0.0, 5.0), options(nodes()))
    assert alone.tiers.tokens == [0, 0, 0, 0]
    assert shared.tiers.tokens == [0, 4096, 0, 0]
    assert shared.tiers.moved["to_engines"] == 4096 * TOKEN_BYTES
    assert shared.cache.lost.elsewhere == 0
    assert shared.latency.ttft_s is not None
    assert alone.latency.ttft_s is not None
    assert shared.latency.ttft_s.p50 < alone.latency.ttft_s.p50


def test_only_workers_of_one_node_share_blocks_unless_nodes_are_peers() -> None:
    _, apart = run(prompts(0.0, 5.0), options(nodes(2)))
    assert apart.cache.cached_tokens == 0
    _, peers = run(prompts(0.0, 5.0), options(nodes(2, peers=True)))
    assert peers.tiers.tokens == [0, 0, 0, 4096]
    assert peers.tiers.moved["network"] == 4096 * TOKEN_BYTES


def test_a_load_takes_its_bytes_over_the_link() -> None:
    at = nodes()
    slow = replace(at, links=replace(at.links, host=4e9))
    times = {}
    for name, chosen in (("fast", at), ("slow", slow)):
        simulation, result = run(prompts(0.0, 5.0), options(chosen))
        assert result.tiers.tokens[ARENA] == 4096
        times[name] = simulation.records.first_token[1] - simulation.records.arrived[1]
    size = 4096 * TOKEN_BYTES
    assert times["slow"] - times["fast"] == pytest.approx(size / 4e9 - size / 25e9, abs=0.01)


def test_loads_queue_behind_each_other_on_the_worker_s_link() -> None:
    at = nodes()
    slow = replace(at, links=replace(at.links, host=4e9))
    workload = prompts(0.0, 5.0, 5.0, own=512)
    simulation, result = run(workload, options(slow, workers=1))
    assert result.tiers.tokens[ARENA] == 0  # the engine still holds the blocks
    seen = simulation.records
    assert seen.cached[1] == seen.cached[2] == 4096


def test_a_prompt_is_computed_while_its_last_blocks_are_loaded() -> None:
    at = nodes()
    workload = cycles(4, 6, tokens=6000, apart=8.0)
    _, alone = run(workload, options(None, workers=1))
    assert alone.latency.ttft_s is not None
    cached, waits = [], []
    for bytes_per_s in (5e7, 1e9, 3e9, 2.5e10):
        linked = replace(at, links=replace(at.links, host=bytes_per_s))
        _, result = run(workload, options(linked, workers=1))
        assert result.latency.ttft_s is not None
        cached.append(result.tiers.tokens[ARENA])
        waits.append(result.latency.ttft_s.p50)
    assert cached == sorted(cached)
    assert cached[0] < 0.1 * cached[-1] < cached[1] < 0.4 * cached[-1] < cached[2] < cached[-1]
    computing = alone.latency.ttft_s.p50
    assert max(waits) < 1.08 * computing  # at most a step more
    assert waits[3] < waits[2] < 0.9 * computing


def test_one_of_two_workers_with_the_same_prompt_computes() -> None:
    workload = prompts(0.0, 0.01, tokens=16384)
    core = replace(CORE, blocks=4096)
    simulation, result = run(workload, options(nodes(), core=core))
    assert simulation.nodes is not None
    assert simulation.nodes.nodes[0].manager.store.counts.waits == 1
    assert result.tiers.tokens == [0, 16384, 0, 0]
    _, apart = run(workload, options(nodes(2, peers=True), core=core))
    assert apart.tiers.tokens[REMOTE] > 8192


def test_evicted_blocks_come_back_from_disk() -> None:
    at = nodes(host_bytes=600 << 20, disk_path=Path("unused"), disk_frequency=1.0)
    _, result = run(cycles(6, 4), options(at, workers=1))
    assert result.tiers.tokens[DISK] > 0
    assert result.tiers.moved["disk_written"] >= 6 * 4080 * TOKEN_BYTES
    assert result.tiers.moved["disk_rewritten"] == 0
    assert result.tiers.moved["disk_read"] >= result.tiers.tokens[DISK] * TOKEN_BYTES
    small = nodes(
        host_bytes=600 << 20, disk_path=Path("unused"), disk_bytes=600 << 20, disk_frequency=1.0
    )
    _, again = run(cycles(6, 4), options(small, workers=1))
    assert again.tiers.moved["disk_rewritten"] > 0


def test_nodes_share_a_remote_store() -> None:
    at = nodes(2, remote_url="redis://unused", remote_frequency=1.0)
    _, result = run(prompts(0.0, 5.0), options(at))
    assert result.tiers.tokens == [0, 0, 0, 4096]
    assert result.tiers.moved["store_read"] == 4096 * TOKEN_BYTES
    assert result.tiers.moved["store_written"] > 0


def test_the_router_credits_the_blocks_of_a_node() -> None:
    """After the worker of the first prompt has left, only its node's memory holds the blocks."""
    workload = prompts(0.0, *(20.0 + 3 * n for n in range(6)))
    chosen = replace(
        options(nodes(2), workers=4, policy="kv"), faults=(Fault(10.0, "leave", 0),), seed=3
    )
    simulation, result = run(workload, chosen)
    first = simulation.records.worker[0]
    others = [n for n in range(4) if n % 2 == first % 2]
    if first == 0:  # the seed decides which worker gets the first prompt
        assert simulation.records.worker[1] in others
    assert result.cache.cached_tokens == 6 * 4096


@pytest.mark.parametrize(("peers", "credited"), [(True, 4096 // SIZE), (False, 0)])
def test_the_router_credits_the_blocks_of_peers_only(peers: bool, credited: int) -> None:
    """Two workers, one on each of two nodes: the other one can load what the first has computed."""
    simulation = Simulation(prompts(0.0, 5.0), options(nodes(2, peers=peers), policy="kv"))
    remote: list[int] = []

    def follow(event: RouteEvent, now: float) -> None:
        if isinstance(event, Decision):
            remote.append(max(candidate.overlap[3] for candidate in event.candidates))

    simulation.routers.on_route = follow
    simulation.run()
    assert remote == [0, credited]


@pytest.mark.parametrize("kind", ["die", "leave"])
def test_a_worker_that_leaves_returns_its_tickets(kind: str) -> None:
    at = nodes()
    slow = replace(at, links=replace(at.links, host=2e8))
    workload = prompts(0.0, 5.0, 5.0, 5.0, 5.0, own=128)
    base = options(slow, workers=3)
    faults = (Fault(5.2, kind, 1), Fault(5.2, kind, 2))  # type: ignore[arg-type]
    simulation, _ = run(workload, replace(base, faults=faults))
    assert simulation.nodes is not None
    node = simulation.nodes.nodes[0]
    assert len(node.manager.attachments.workers) == 1


def test_runs_with_nodes_are_deterministic() -> None:
    at = nodes(2, host_bytes=2 << 30, disk_path=Path("unused"), peers=True)
    workload = cycles(12, 5, apart=0.3)
    results = [run(workload, options(at, workers=4, policy="kv"))[1] for _ in range(2)]
    assert results[0] == results[1]
    assert results[0].tiers.tokens[ARENA] > 0


def test_preempted_and_crowded_engines_lose_no_blocks() -> None:
    at = nodes(host_bytes=128 << 20, disk_path=Path("unused"), disk_frequency=1.0)
    core = replace(CORE, blocks=300)
    workload = cycles(10, 6, tokens=2000, apart=0.02)
    simulation, result = run(workload, options(at, workers=2, core=core))
    for worker in simulation.workers.values():
        blocks = worker.core.blocks
        assert blocks.active + blocks.cached <= blocks.capacity
    assert sum(result.tiers.tokens) == result.cache.cached_tokens


def test_a_released_session_leaves_its_node() -> None:
    simulation, _ = run(prompts(0.0, ends=True), options(nodes(), workers=1))
    assert simulation.nodes is not None
    node = simulation.nodes.nodes[0]
    assert node.record.evicted_blocks > 4096 // SIZE
    assert len(node.manager.store.blocks) <= 1  # whose write had begun


def test_invalid_nodes_are_rejected() -> None:
    tiers = replace(CORE, tiers=TierOptions(host_blocks=10))
    with pytest.raises(SimulationError, match="replace the mock's own tiers"):
        options(nodes(), core=tiers).check()
    elsewhere = SimulationOptions(workers=(WorkerOptions(1, CORE, node=3),), nodes=nodes(2))
    with pytest.raises(SimulationError, match="no node 3"):
        elsewhere.check()
    huge = options(replace(nodes(host_bytes=1 << 20), bytes_per_token=1 << 20))
    with pytest.raises(SimulationError, match="does not hold one block"):
        huge.check()


def test_the_report_has_the_tiers_and_links_in_use() -> None:
    chosen = options(nodes(2, peers=True))
    _, result = run(prompts(0.0, 5.0), chosen)
    table = {name: cell(result) for name, cell in rows([result])}
    assert table["· from remote"] == "49.2%"
    assert table["GiB between nodes"] == "0.2"
    assert table["loads"] == "1"
    assert "GiB read from disk" not in table
    _, without = run(prompts(0.0), options(None))
    assert not {name for name, _ in rows([without])} & {"loads", "· from engine"}
    assert "4.0 GiB of memory" in dict(conditions(chosen))["nodes"]


def test_prompts_are_restored_from_disk_while_tools_run() -> None:
    """Harnesses report the ends of their tools; the disk is slower than the engine computes."""
    tree = Tree()
    rounds: list[Round] = []
    for number in range(12):
        branch, first = tree.fork(), len(rounds)
        rounds += [
            Round(
                session=number,
                branch=branch,
                output_branch=branch,
                input_tokens=4096 + 64 * turn,
                output_tokens=20,
                at_s=60.0 + 20.0 * number if turn else 4.0 * number,
                after=(first,) if turn else (),
                wait="Bash" if turn else "",
            )
            for turn in range(2)
        ]
    sessions = [Session(name=f"s{number}", ends=True) for number in range(12)]
    workload = Workload(tree=tree, sessions=sessions, rounds=rounds)
    cached: dict[str, float] = {}
    for restore in ("off", "auto"):
        at = nodes(host_bytes=1 << 30, disk_path=Path("disk"), disk_frequency=1.0, restore=restore)
        slow = replace(at, links=replace(at.links, disk=1e9))
        simulated = replace(options(slow, workers=1), tool_events=True)
        simulation = Simulation(workload, simulated)
        simulation.run()
        assert simulation.nodes is not None
        use = simulation.nodes.nodes[0].manager.store.restored
        assert (use.bytes > 0) == (restore == "auto")
        cached[restore] = figures(simulation).cache.cached_share
    assert use.read_bytes > use.lost_bytes
    assert cached["auto"] > cached["off"] + 0.1
