"""Each tenant has its share of a frontend, whatever the others send."""

import pytest

from kvmesh.frontend.auth.admission import BEHIND_S, Admission
from kvmesh.frontend.errors import Overloaded


def test_beyond_the_limit_only_those_below_an_equal_share_get_in() -> None:
    admission = Admission(8)
    for _ in range(8):
        admission.enter("a", 0.0)
    with pytest.raises(Overloaded):
        admission.enter("a", 0.0)
    for _ in range(4):
        admission.enter("b", 0.0)
    for tenant in "ab":
        with pytest.raises(Overloaded):
            admission.enter(tenant, 0.0)
    for _ in range(5):
        admission.leave("a")
    admission.enter("b", 0.0)


def test_tenants_together_get_at_most_the_limit_once_more() -> None:
    admission = Admission(16)
    for _ in range(16):
        admission.enter("a", 0.0)
    admitted = 0
    for number in range(100):
        for _ in range(16):
            try:
                admission.enter(f"t{number}", 0.0)
            except Overloaded:
                break
            admitted += 1
    assert admitted == 16
    assert admission._running["t0"] == 8


def test_a_frontend_that_is_behind_serves_those_who_have_least_of_it() -> None:
    admission = Admission(100)
    for _ in range(10):
        admission.enter("a", 0.0)
    with pytest.raises(Overloaded) as refused:
        admission.enter("a", BEHIND_S + 1)
    assert refused.value.retry_after == BEHIND_S + 1
    for _ in range(5):
        admission.enter("b", BEHIND_S + 1)
    admission.enter("a", BEHIND_S)


def test_an_idle_frontend_that_is_behind_takes_one_request_of_each() -> None:
    admission = Admission(100)
    admission.enter("a", BEHIND_S + 1)
    with pytest.raises(Overloaded):
        admission.enter("a", BEHIND_S + 1)
    admission.leave("a")
    admission.enter("a", BEHIND_S + 1)
