"""What can go wrong on the bus, each with the data that a caller needs."""


def cause(error: BaseException) -> str:
    """What an error says; of one that says nothing, as many timeouts do, what it is."""
    return str(error) or ("timed out" if isinstance(error, TimeoutError) else type(error).__name__)


class BusError(Exception):
    """Base of every error of this package."""


class BusUnavailable(BusError):
    """No NATS server with JetStream answered at `url`."""

    def __init__(self, url: str, reason: BaseException) -> None:
        super().__init__(f"cannot use NATS at {url}: {cause(reason)}")
        self.url = url


class ServerUnfit(BusError):
    """The NATS server cannot serve a mesh as it is configured; the message names its setting."""


class NoResponder(BusError):
    """Nobody listens on `subject`: the process is gone, or none has started yet."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"nobody answers on {subject}")
        self.subject = subject


class RequestTimeout(BusError):
    """Somebody listens on `subject` but did not answer within `timeout` seconds."""

    def __init__(self, subject: str, timeout: float) -> None:
        super().__init__(f"no answer on {subject} within {timeout:g} s")
        self.subject = subject
        self.timeout = timeout


class MessageTooLarge(BusError):
    """A message of `size` bytes is more than the server takes."""

    def __init__(self, subject: str, size: int) -> None:
        super().__init__(f"a message of {size} bytes on {subject} is more than the server takes")
        self.subject = subject
        self.size = size


class ModelFilesError(BusError):
    """A model's files are missing, too large, or do not match their digest."""
