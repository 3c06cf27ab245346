"""Times and classes of returns."""

from math import inf

import pytest

from kvmesh.bus.messages import ReturnClass
from kvmesh.observer.returns import finest_class, median_s
from kvmesh.returns.rates import BINS

CONSTANT = [0.1] * BINS
EARLY = [2.0, 1.0, *[0.0] * (BINS - 2)]  # all returns within the first second


def test_half_of_the_prompts_have_returned_by_the_median() -> None:
    assert median_s(CONSTANT) == pytest.approx(6.93, abs=0.01)


def test_prompts_that_no_longer_return_stay_out() -> None:
    assert median_s(EARLY) == pytest.approx(0.347, abs=0.001)
    assert median_s([0.0] * BINS) == inf
    assert median_s([0.0] * (BINS - 1) + [1.0]) == pytest.approx(8192.69, abs=0.01)


def known(*labels: str) -> ReturnClass:
    return ReturnClass(
        model="m", waits=list(labels), prompts=1.0, returned=1.0, expected=1.0, rates=b""
    )


def test_the_finest_class_of_a_reason_is_found() -> None:
    classes = [known("tool"), known("tool", "Bash"), known("human"), known("tool", "Bash", "ls")]
    for labels, found in (
        (["tool", "Bash", "npm test"], ["tool", "Bash"]),
        (["tool", "Bash", "ls"], ["tool", "Bash", "ls"]),
        (["tool", "Read"], ["tool"]),
    ):
        best = finest_class(classes, labels)
        assert best is not None
        assert best.waits == found
    assert finest_class(classes, ["end"]) is None
    assert finest_class([*classes, known()], ["end"]) == known()
