"""The text of errors."""

import pytest
from nats.errors import ConnectionClosedError
from nats.errors import TimeoutError as NatsTimeoutError

from kvmesh.bus.errors import BusUnavailable, NoResponder, cause


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoResponder("x"), "no process listens on x"),
        (TimeoutError(), "timed out"),
        (NatsTimeoutError(), "nats: timeout"),
        (ConnectionClosedError(), "nats: connection closed"),
        (OSError(), "OSError"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
    ],
)
def test_every_error_has_a_text(error: Exception, text: str) -> None:
    assert text in cause(error)
    assert text in str(BusUnavailable("nats://here", error))
