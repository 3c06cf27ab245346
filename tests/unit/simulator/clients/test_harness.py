"""Simulated clients report the activities of their agents and pass on their hints."""

from msgspec.structs import replace

from kvmesh.bus.messages import Decision, Outcome, RouteEvent
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.clients.harness import Harness
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

SIZE = 16
FIRST = 640


def agents(marks: tuple[tuple[int, float], ...] = ()) -> Workload:
    """An agent that runs a tool, starts a child and waits for it, then for its human."""
    tree = Tree()
    own, child = tree.fork(), tree.fork()

    def asked(
        session: int, tokens: int, after: tuple[int, ...], wait: str, approval: float
    ) -> Round:
        branch = child if session else own
        return Round(
            session=session,
            branch=branch,
            output_branch=branch,
            input_tokens=tokens,
            output_tokens=10,
            at_s=1.0,
            after=after,
            wait=wait,
            wait_class="push" if approval else "",
            approval_s=approval,
            marks=marks if not session else (),
            osl=12,
        )

    rounds = [
        asked(0, FIRST, (), "", 0.0),
        asked(0, 700, (0,), "Bash", 0.5),
        asked(1, 300, (1,), "", 0.0),
        asked(0, 800, (1, 2), "Read", 0.0),
        asked(0, 900, (3,), "human", 0.0),
    ]
    sessions = [
        Session(name="a", kind="coder"),
        Session(name="b", kind="explorer", parent=0, ends=True),
    ]
    rounds[-1] = replace(rounds[-1], abort_after=5)
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def simulated(workload: Workload, blocks: int = 1024) -> tuple[Simulation, list[RouteEvent]]:
    core = CoreOptions(blocks=blocks, limits=SchedulerLimits(block_size=SIZE))
    options = SimulationOptions(
        router=RouterSettings(policy="kv"), workers=(WorkerOptions(1, core),), seed=1
    )
    simulation = Simulation(workload, options)
    events: list[RouteEvent] = []
    simulation.routers.on_route = lambda event, _: events.append(event)
    simulation.run()
    return simulation, events


def test_a_wait_is_named_from_coarse_to_fine() -> None:
    harness = Harness(agents())
    assert [harness.waits_for(index) for index in range(5)] == [
        ["tool", "Bash", "push"],
        ["tool", "Agent"],
        ["end"],
        ["human"],
        [],
    ]


def test_outcomes_tell_routers_the_agent_and_its_wait() -> None:
    _, events = simulated(agents())
    outcomes = [event for event in events if isinstance(event, Outcome)]
    assert [outcome.agent for outcome in outcomes] == [
        "coder",
        "coder",
        "explorer",
        "coder",
        "coder",
    ]
    assert outcomes[0].waits_for == ["tool", "Bash", "push"]


def test_routers_learn_the_output_length_that_the_client_expects() -> None:
    _, events = simulated(agents())
    assert {event.hints.osl for event in events if isinstance(event, Decision)} == {12}


def test_marked_prompts_are_retained_as_on_a_live_worker() -> None:
    marked, _ = simulated(agents(((FIRST, 3600.0),)))
    plain, _ = simulated(agents())
    blocks = [next(iter(each.workers.values())).core.blocks for each in (marked, plain)]
    now = marked.clock.now
    states = [each.retention.state(0, now) for each in blocks]
    assert [state.charged_blocks for state in states] == [FIRST // SIZE, 0]
    assert states[0].outcomes["honoured"] == 4


def test_a_harness_reports_an_approval_then_the_tool() -> None:
    reports = list(Harness(agents()).reports(0, 10.0, 1.0))
    assert [(each.event, each.time) for each in reports] == [
        ("awaiting_approval", 10.0),
        ("started", 10.5),
        ("ended", 11.0),
    ]
    assert {(each.session, each.call, each.tool) for each in reports} == {("a", "call-0", "Bash")}
    estimate = reports[1].remaining_s
    assert estimate is not None
    assert 0.05 < estimate < 5.0


def test_nothing_is_reported_while_children_or_people_are_awaited() -> None:
    harness = Harness(agents())
    assert [list(harness.reports(index, 10.0, 1.0)) for index in (1, 2, 3, 4)] == [[]] * 4


def test_reports_reach_every_router() -> None:
    core = CoreOptions(blocks=1024, limits=SchedulerLimits(block_size=SIZE))
    options = SimulationOptions(workers=(WorkerOptions(1, core),), replicas=2, tool_events=True)
    simulation = Simulation(agents(), options)
    simulation.run()
    for replica in simulation.routers.replicas:
        forecaster = replica.core.learning.returns
        assert forecaster is not None
        end = forecaster.tools.end("a", since=0.0)
        assert end is not None
        assert end <= simulation.clock.now + replica.core.epoch
