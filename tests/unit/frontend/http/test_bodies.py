"""Request bodies: UTF-8 across the slices in which they are checked; unexpected errors."""

import pytest

from kvmesh.bus.errors import NotPermitted
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.http.bodies import LARGE, check_utf8, internal_error


@pytest.mark.parametrize("place", [0, LARGE - 1, LARGE, 2 * LARGE + 3])
async def test_a_large_body_must_be_utf8_across_slices(place: int) -> None:
    text = ("x" * place + "é🦀" * LARGE).encode()
    await check_utf8(text)
    for bad in (text[:place] + b"\xff" + text[place:], text[:-1]):
        with pytest.raises(InvalidRequest, match="not valid UTF-8"):
            await check_utf8(bad)


def test_a_failure_of_the_bus_is_unavailable_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    error = internal_error(NotPermitted("kvm.x.work.w.1"), "r-1")
    assert (error.kind, error.retry_after) == ("unavailable", 1.0)
    assert "kvm." not in error.message
    (line,) = caplog.messages
    assert line.endswith("does not permit this process to publish on kvm.x.work.w.1")
    assert caplog.records[0].exc_info is None
