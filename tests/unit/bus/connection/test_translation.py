"""Errors of nats-py and of the connection become errors of the bus."""

import pytest
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import errors as js

from kvmesh.bus.connection.direct_client import PayloadTooLarge, PermissionDenied
from kvmesh.bus.connection.translation import bus_errors, raising_bus_errors
from kvmesh.bus.errors import (
    BusError,
    BusTimeout,
    Conflict,
    JetStreamError,
    JetStreamUnavailable,
    MessageTooLarge,
    NoResponder,
    NotConnected,
    NotFound,
    NotPermitted,
    ObjectUnreadable,
)

EXPECTED = [
    (PermissionDenied("a"), NotPermitted),
    (PayloadTooLarge("max_payload"), MessageTooLarge),
    (NoRespondersError(), NoResponder),
    (NatsTimeoutError(), BusTimeout),
    (TimeoutError(), BusTimeout),
    (ConnectionClosedError(), NotConnected),
    (ConnectionResetError(104, "reset"), NotConnected),
    (js.NoStreamResponseError(), JetStreamUnavailable),
    (js.ServiceUnavailableError(), JetStreamUnavailable),
    (js.ServerError(code=500, err_code=10077), JetStreamUnavailable),
    (js.NotFoundError(code=404), NotFound),
    (js.BucketNotFoundError(), NotFound),
    (js.KeyNotFoundError(), NotFound),
    (js.KeyDeletedError(), NotFound),
    (js.ObjectNotFoundError(), NotFound),
    (js.KeyWrongLastSequenceError("wrong last sequence"), Conflict),
    (js.BadRequestError(code=400, err_code=10058), Conflict),
    (js.APIError(code=400, err_code=10047), JetStreamError),
    (js.BadObjectMetaError(), ObjectUnreadable),
]


@pytest.mark.parametrize(("error", "expected"), EXPECTED, ids=lambda value: type(value).__name__)
def test_each_error_has_one_of_the_bus(error: Exception, expected: type[BusError]) -> None:
    with pytest.raises(BusError) as found, bus_errors("subject", 7):
        raise error
    assert type(found.value) is expected
    assert found.value.__cause__ is error
    assert str(found.value)


async def test_an_error_of_the_bus_and_others_pass_unchanged() -> None:
    async def fail(error: Exception) -> None:
        raise error

    for error in (NoResponder("a"), ValueError("b")):
        with pytest.raises(type(error)) as found:
            await raising_bus_errors(fail)(error)
        assert found.value is error
