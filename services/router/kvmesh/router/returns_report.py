"""Report of what a router has learned about returns, for operators. Pure."""

from collections.abc import Iterable, Iterator
from heapq import nlargest
from math import inf

from kvmesh.bus.messages import (
    ActiveAgentsReport,
    RestingAgent,
    ReturnCheck,
    ReturnClass,
    ReturnsReport,
)
from kvmesh.returns.rates import pack_rates
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.policies.admission import AgentAdmission

MAX_CLASSES = 512  # of one model, and of the report
MAX_RESTING = 128  # of one model


def returns_report(cores: Iterable[RouterCore], now: float) -> ReturnsReport:
    """The classes of most prompts; the checks and agents of all models. `now` is the core's."""
    cores = list(cores)
    classes = (each for core in cores for each in _classes(core))
    checks = [each for core in cores for each in _checks(core)]
    agents = [each for core in cores for each in _agents(core, now)]
    most = nlargest(MAX_CLASSES, classes, key=lambda each: each.prompts)
    return ReturnsReport(most, checks, agents)


def _agents(core: RouterCore, now: float) -> Iterator[ActiveAgentsReport]:
    admission = core.policies.default
    if not isinstance(admission, AgentAdmission):
        return
    share = admission.window.share
    longest = nlargest(
        MAX_RESTING, admission.waiting.items(), key=lambda item: item[1].rested_s(now)
    )
    yield ActiveAgentsReport(
        model=core.model,
        active=admission.active,
        window=None if share == inf else share,
        lost_share=admission.window.lost_share,
        resting=[
            RestingAgent(
                session=session,
                owner=agent.owner,
                tokens=agent.context,
                rested_s=agent.rested_s(now),
                ends_in_s=max(agent.rest_ends - now, 0.0),
            )
            for session, agent in longest
        ],
    )


def _classes(core: RouterCore) -> Iterator[ReturnClass]:
    if core.learning.returns is None:
        return
    for found in core.learning.returns.curves.summaries(MAX_CLASSES):
        yield ReturnClass(
            model=core.model,
            waits=list(found.waits),
            prompts=found.prompts,
            returned=found.returned,
            expected=found.expected,
            rates=pack_rates(found.rates),
        )


def _checks(core: RouterCore) -> Iterator[ReturnCheck]:
    if core.learning.returns is None:
        return
    for check in core.learning.returns.curves.calibrations:
        yield ReturnCheck(
            model=core.model,
            within_s=check.within_s,
            expected=check.expected,
            observed=check.observed,
        )
