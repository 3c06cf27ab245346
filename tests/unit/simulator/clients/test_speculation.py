"""Simulated speculative prefills: computed behind all requests, and used only if they fit."""

import pytest
from msgspec.structs import replace

from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions, WorkerOptions
from kvmesh.simulator.report.figures import figures
from kvmesh.simulator.report.tables import notes
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

SIZE = 16


def thinker(wait_s: float = 60.0, *, keeps: bool = False, compacts: bool = False) -> Workload:
    """Two turns: 3,200 tokens, an answer of 640 with 320 of thinking, and 160 tokens of a result.

    The second prompt contains the thinking if the client `keeps` it, and nothing of the first one
    but its system prompt of 1,600 tokens if it `compacts`.
    """
    tree = Tree()
    system = tree.fork()
    own = tree.fork(system, 1600)
    private = own if keeps else tree.fork(own, 3200)
    second = tree.fork(system, 1600) if compacts else own
    first = Round(
        session=0,
        branch=own,
        output_branch=private,
        input_tokens=3200,
        output_tokens=640,
        thinking_tokens=0 if keeps else 320,
    )
    later = replace(
        first,
        branch=second,
        output_branch=second if keeps or compacts else tree.fork(second, 3680),
        input_tokens=4000 if keeps else 3680,
        at_s=wait_s,
        after=(0,),
        wait="Bash",
    )
    return Workload(tree=tree, sessions=[Session(name="s")], rounds=[first, later])


def run(workload: Workload, tokens: int = 8192, engines: int = 1) -> Simulation:
    core = CoreOptions(blocks=2048, limits=SchedulerLimits(block_size=SIZE))
    simulation = Simulation(
        workload,
        SimulationOptions(
            router=RouterSettings(policy="kv"),
            workers=(WorkerOptions(engines, core),),
            speculative_prefill="hinted" if tokens else "off",
            speculative_tokens=tokens,
        ),
    )
    simulation.run()
    return simulation


def test_the_visible_answer_is_computed_before_the_next_prompt_needs_it() -> None:
    plain, ahead = run(thinker(), 0), run(thinker())
    assert plain.records.cached == [0, 3200]
    assert ahead.records.cached == [0, 3520]
    assert ahead.records.first_token[1] < plain.records.first_token[1]
    record = ahead.speculation.record
    assert (record.prefills, record.computed_tokens, record.useful_tokens) == (2, 640, 320)


def test_the_budget_bounds_a_prefill() -> None:
    simulation = run(thinker(), 100)
    assert simulation.records.cached[1] == 3200 + 96
    assert simulation.speculation.record.useful_tokens == 96


def test_answers_that_later_prompts_contain_need_no_prefill() -> None:
    record = run(thinker(keeps=True)).speculation.record
    assert record.prefills == 0


def test_tokens_for_a_prompt_that_never_comes_are_wasted() -> None:
    record = run(thinker(compacts=True)).speculation.record
    assert (record.computed_tokens, record.useful_tokens) == (320, 0)


def test_the_real_prompt_stops_the_prefill_and_counts_its_part() -> None:
    simulation = run(thinker(wait_s=0.0))
    assert simulation.records.error == [None, None]
    assert simulation.speculation.record.useful_tokens <= 320
    worker = next(iter(simulation.workers.values()))
    assert not worker.core.busy or not worker.core.scheduler.running


@pytest.mark.parametrize("marked", [{"ends": True}, {"abort": True}])
def test_nothing_is_computed_after_a_final_or_cancelled_answer(marked: dict[str, bool]) -> None:
    workload = thinker()
    if marked.get("ends"):
        workload.sessions[0] = replace(workload.sessions[0], ends=True)
    else:
        workload.rounds[1] = replace(workload.rounds[1], abort_after=20)
    assert run(workload).speculation.record.prefills == 1


def test_the_report_tells_the_share_that_was_used() -> None:
    simulation = run(thinker())
    assert list(notes(figures(simulation))) == [
        "kv: 2 speculative prefills of 640 tokens, 50.0% of them used by the next prompt"
    ]
    assert figures(run(thinker(), 0)).ahead is None
