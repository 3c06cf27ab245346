"""The demands on a NATS server's configuration, checked before it fails somewhere deep.

Error codes: https://github.com/nats-io/nats-server/blob/main/server/errors.json
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import JetStreamError, JetStreamUnavailable, ServerUnfit

LEAST_PAYLOAD = 1 << 20
GOOD_PAYLOAD = "8MB"
JETSTREAM = "jetstream { store_dir: … }"
NOT_FOR_ACCOUNT = 10039
FILES_FULL, MEMORY_FULL, RESOURCES = 10047, 10028, 10023
NO_CLUSTER = 10074


async def check_server(bus: Bus) -> None:
    """Raise ServerUnfit if the server's settings are too small; else another BusError."""
    size = bus.max_payload
    if size < LEAST_PAYLOAD:
        raise ServerUnfit(
            f"the NATS server takes messages of {size} bytes at most: set max_payload in its"
            f" configuration to {GOOD_PAYLOAD}, or at least 1MB"
        )
    try:
        await bus.js.account_info()
    except JetStreamError as error:
        absent = isinstance(error, JetStreamUnavailable) and error.code == 503
        if absent and error.err_code is None:  # nobody listens on JetStream's subjects
            raise ServerUnfit(
                f"the NATS server runs without JetStream: add {JETSTREAM} to its configuration"
            ) from error
        if error.err_code == NOT_FOR_ACCOUNT:
            raise ServerUnfit(
                "the NATS account has no JetStream: add `jetstream: enabled` to it in the"
                " server's configuration"
            ) from error
        raise


@contextmanager
def explained(stream: str, size: float) -> Iterator[None]:
    """Turn the refusal of a stream of `size` bytes into a ServerUnfit that names the setting."""
    try:
        yield
    except JetStreamError as error:
        reason = _reason(error.err_code, size)
        if reason is None:
            raise
        raise ServerUnfit(f"the NATS server cannot keep {stream}: {reason}") from error


def _reason(code: int | None, size: float) -> str | None:
    wanted = f"{size / (1 << 20):.0f} MiB are wanted"
    lower = "or lower the *_bytes of [streams]"
    if code == MEMORY_FULL:
        return f"{wanted}; raise max_memory_store in its configuration, {lower}"
    if code in (FILES_FULL, RESOURCES):
        return f"{wanted}; raise max_file_store in its configuration, {lower}"
    if code == NO_CLUSTER:
        return "it is not one of as many servers in a cluster as nats.replicas says"
    return None
