"""The errors of the bus. Every operation on the bus raises these and no others."""

from kvmesh.settings.redaction import redacted


def cause(error: BaseException) -> str:
    """The text of an error; "timed out" or its class name if it has none, as many timeouts."""
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else type(error).__name__)


URL_SETTING = "set its URL with --nats or KVMESH_NATS_URL"


STREAM_NOT_FOUND = 10059  # JetStream's error code


class BusError(Exception):
    """Base of every error of this package."""


class BusUnavailable(BusError):
    """No NATS server with JetStream replied at `url`, or it denies access to this process."""

    def __init__(self, url: str, reason: BaseException) -> None:
        self.url = redacted(url)
        self.denied = isinstance(reason, PermissionError)
        super().__init__(f"cannot use NATS at {self.url}: {cause(reason)}")


class CredentialsUnusable(BusUnavailable):
    """A file of credentials or of TLS is unusable; the message names the setting and the file."""

    def __init__(self, reason: str) -> None:
        super().__init__("", PermissionError())
        self.args = (reason,)


class ServerUnfit(BusError):
    """The NATS server's configuration does not suit a mesh; the message names the setting."""


class OutOfReach(ServerUnfit):
    """JetStream of another domain or account does not answer: the link to it may be down."""


class NotConnected(BusError):
    """The connection is closed, or it broke during the operation."""


class BusTimeout(BusError):
    """No reply in time."""


class RequestTimeout(BusTimeout):
    """A process listens on `subject` but did not reply within `timeout` seconds."""

    def __init__(self, subject: str, timeout: float) -> None:
        super().__init__(f"no reply on {subject} within {timeout:g} s")
        self.subject = subject
        self.timeout = timeout


class NoResponder(BusError):
    """No process listens on `subject`: it is gone, or none has started yet.

    Of a request that was to fail at once, it may also be changing servers.
    """

    def __init__(self, subject: str) -> None:
        super().__init__(f"no process listens on {subject}")
        self.subject = subject


class NotPermitted(BusError):
    """The server does not permit this process an `act`, such as publishing, on `subject`."""

    def __init__(self, subject: str, act: str = "publish on") -> None:
        super().__init__(f"the NATS server does not permit this process to {act} {subject}")
        self.subject = subject
        self.publishes = act == "publish on"


class MessageTooLarge(BusError):
    """A message of `size` bytes exceeds `max_payload`; `limit` says whose and how much it is."""

    def __init__(self, subject: str, size: int, limit: str = "the server's max_payload") -> None:
        super().__init__(f"a message of {size} bytes on {subject} exceeds {limit}")
        self.subject = subject
        self.size = size
        self.limit = limit


class MalformedReply(BusError):
    """A reply on `subject` cannot be decoded."""

    def __init__(self, subject: str, reason: BaseException) -> None:
        super().__init__(f"malformed reply on {subject}: {cause(reason)}")
        self.subject = subject


class JetStreamError(BusError):
    """JetStream refused an operation. `code` is like HTTP's, `err_code` JetStream's own.

    Error codes: https://github.com/nats-io/nats-server/blob/main/server/errors.json
    """

    def __init__(self, reason: str, code: int | None = None, err_code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.err_code = err_code


class JetStreamUnavailable(JetStreamError):
    """JetStream is missing or not ready: a cluster elects a leader, for example (500, 503)."""


class NotFound(JetStreamError):
    """No such stream, bucket, key, object or message; deleted ones included."""


class Conflict(JetStreamError):
    """A key has another revision, or a stream exists with another configuration."""


class StorageFull(JetStreamError):
    """A stream has as many bytes as it may."""


def is_missing_stream(error: BaseException) -> bool:
    """True if an error may mean that a stream or bucket is gone: nobody stores, or lists it."""
    if isinstance(error, JetStreamUnavailable):
        return error.code == 503 and error.err_code is None
    if isinstance(error, JetStreamError):
        return error.err_code == STREAM_NOT_FOUND
    return isinstance(error, NoResponder)


class ObjectUnreadable(BusError):
    """The description or the content of a stored object is damaged."""


class ModelFilesError(BusError):
    """A model's files are missing, too large, or do not match their digest."""
