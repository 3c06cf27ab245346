"""One decision of the planner: reason, pools, the fleets it considered, and its inputs."""

import time
from collections.abc import Mapping

from nicegui import ui

from kvmesh.bus.messages import ScalingDecision
from kvmesh.dashboard.elements.plain_table import headed_table
from kvmesh.dashboard.elements.shell import heading
from kvmesh.dashboard.mesh import Mesh
from kvmesh.dashboard.state.plan import (
    ModelPlan,
    candidate_rows,
    kept_rows,
    pool_rows,
    signal_rows,
)
from kvmesh.observer.plans import by_model


def show(mesh: Mesh, query: Mapping[str, str]) -> None:
    """Build the page of the decision that the query names by `model`, `time` and `planner`."""
    wanted = (query.get("time", ""), query.get("planner", ""))
    own = by_model(mesh.decisions).get(query.get("model", ""), [])
    found = next((each for each in own if (repr(each.time), each.planner) == wanted), None)
    ui.link("All decisions", "/planner")
    if found is None:
        ui.label("The dashboard holds no such decision: it keeps those of the last hours.")
        return
    _show(found, ModelPlan(own, found.time))


def _show(decision: ScalingDecision, plan: ModelPlan) -> None:
    then = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(decision.time))
    connector = f" through {decision.connector}" if decision.connector else ""
    ui.label(f"{decision.model}: {decision.reason}").style("font-size: 1.1rem; font-weight: 600")
    ui.label(f"{then}, by {decision.planner}{connector}; {_effect(decision)}")
    came = plan.hindsight(decision)
    if came is None:
        ui.label("Another planner led at this time.").classes("warn")
    else:
        ui.label(f"Came true: {came.text(decision.signals.get('forecast_per_s', 0.0))}")
    if decision.stop:
        ui.label(f"Workers to stop first: {', '.join(decision.stop)}")
    for switch in decision.switches:
        ui.label(
            f"{switch.instance} changes its role: from pool {switch.source} to {switch.target}"
        )
    heading("Pools")
    headed_table("pools", pool_rows(decision))
    heading("Fleets considered, with the share of requests that would keep each promise")
    if decision.candidates:
        headed_table("fleets considered", candidate_rows(decision))
    else:
        ui.label("None: the planner evaluates fleets only when the load may need others.")
    if decision.kept or decision.unreachable:
        heading("Promises")
        headed_table("promises", kept_rows(decision))
    heading("Signals")
    headed_table("signals", signal_rows(decision))


def _effect(decision: ScalingDecision) -> str:
    cost = f"{decision.cost:g} per hour" if decision.cost else "no cost"
    return f"{'changes the pools' if decision.changed else 'changes no pool'}, costs {cost}"
