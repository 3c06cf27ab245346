"""Report of what a router has learned about returns, for operators. Pure."""

from collections.abc import Iterable, Iterator
from heapq import nlargest

from kvmesh.bus.messages import ReturnCheck, ReturnClass, ReturnsReport
from kvmesh.returns.rates import pack_rates
from kvmesh.router.placement.router import RouterCore

MAX_CLASSES = 512  # of one model, and of the report


def returns_report(cores: Iterable[RouterCore]) -> ReturnsReport:
    """The classes of most prompts, and the checks of all models."""
    cores = list(cores)
    classes = (each for core in cores for each in _classes(core))
    checks = [each for core in cores for each in _checks(core)]
    return ReturnsReport(nlargest(MAX_CLASSES, classes, key=lambda each: each.prompts), checks)


def _classes(core: RouterCore) -> Iterator[ReturnClass]:
    if core.returns is None:
        return
    for found in core.returns.curves.summaries(MAX_CLASSES):
        yield ReturnClass(
            model=core.model,
            waits=list(found.waits),
            prompts=found.prompts,
            returned=found.returned,
            expected=found.expected,
            rates=pack_rates(found.rates),
        )


def _checks(core: RouterCore) -> Iterator[ReturnCheck]:
    if core.returns is None:
        return
    for check in core.returns.curves.calibrations:
        yield ReturnCheck(
            model=core.model,
            within_s=check.within_s,
            expected=check.expected,
            observed=check.observed,
        )
