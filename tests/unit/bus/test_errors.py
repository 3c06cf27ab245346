"""What is said of an error."""

import pytest
from nats.errors import ConnectionClosedError
from nats.errors import TimeoutError as NatsTimeoutError

from kvmesh.bus.errors import BusUnavailable, NoResponder, cause


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NoResponder("x"), "nobody answers on x"),
        (TimeoutError(), "timed out"),
        (NatsTimeoutError(), "nats: timeout"),
        (ConnectionClosedError(), "nats: connection closed"),
        (OSError(), "OSError"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
    ],
)
def test_every_cause_is_said(error: Exception, said: str) -> None:
    assert said in cause(error)
    assert said in str(BusUnavailable("nats://here", error))
