"""Translates the errors of nats-py and of the connection into those of the bus."""

from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js import errors as js

from kvmesh.bus.connection.api_errors import (
    NOT_STORED,
    STREAM_EXISTS,
    WRONG_LAST_SEQUENCE,
    explained,
)
from kvmesh.bus.connection.direct_client import PayloadTooLarge, PermissionDenied, SubjectTooLong
from kvmesh.bus.errors import (
    STREAM_NOT_FOUND,
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
    StorageFull,
    cause,
)

RECEIVE = "receive replies (set nats.inbox_prefix to one that it permits) on"
ABSENT = "no JetStream answers: the server or the account has none"
P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def bus_errors(subject: str = "", size: int = 0) -> Iterator[None]:
    """Raise a BusError for every failure inside; `subject` and `size` are the message's."""
    try:
        yield
    except (NatsError, OSError) as error:
        raise to_bus_error(error, subject, size) from error


def raising_bus_errors(call: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """`call`, raising only BusError."""

    @wraps(call)
    async def translated(*args: P.args, **kwargs: P.kwargs) -> R:
        with bus_errors():
            return await call(*args, **kwargs)

    return translated


def to_bus_error(error: NatsError | OSError, subject: str = "", size: int = 0) -> BusError:
    """The bus's error for one of nats-py or of the connection."""
    if isinstance(error, js.APIError):
        return _jetstream_error(error)
    if isinstance(error, PermissionDenied):
        if error.listens:
            return NotPermitted(error.subject, RECEIVE)
        return NotPermitted(subject or error.subject)
    if isinstance(error, PayloadTooLarge):
        return MessageTooLarge(subject, size, error.limit)
    if isinstance(error, SubjectTooLong):
        return BusError(cause(error))
    if isinstance(error, NoRespondersError):
        return NoResponder(subject)
    if isinstance(error, TimeoutError):
        return BusTimeout(cause(error))
    if isinstance(error, js.NoStreamResponseError):
        return JetStreamUnavailable(cause(error), 503)
    if isinstance(error, js.BadObjectMetaError | js.DigestMismatchError):
        return ObjectUnreadable(cause(error))
    if isinstance(error, js.Error):
        return JetStreamError(cause(error))
    return NotConnected(cause(error))


def _jetstream_error(error: js.APIError) -> JetStreamError:
    # some of nats-py's errors leave out the attributes of their base class
    code, err_code = getattr(error, "code", None), getattr(error, "err_code", None)
    description = getattr(error, "description", None)
    text = explained(description, err_code) if description else cause(error)
    if err_code == NOT_STORED and "maximum bytes" in text:
        return StorageFull(text, code, err_code)
    if isinstance(error, js.ServerError):
        return JetStreamUnavailable(text, 500, err_code)
    if isinstance(error, js.ServiceUnavailableError):
        return JetStreamUnavailable(text if code else ABSENT, 503, err_code)
    if isinstance(error, js.BucketNotFoundError):
        return NotFound(text, 404, STREAM_NOT_FOUND)
    if isinstance(error, js.NotFoundError):
        return NotFound(text, 404, err_code)
    if isinstance(error, js.KeyWrongLastSequenceError):
        return Conflict(text, 400, WRONG_LAST_SEQUENCE)
    if err_code in (STREAM_EXISTS, WRONG_LAST_SEQUENCE):
        return Conflict(text, code, err_code)
    return JetStreamError(text, code, err_code)
