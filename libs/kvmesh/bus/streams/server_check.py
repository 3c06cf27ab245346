"""Checks a NATS server's configuration when a process starts.

Error codes: https://github.com/nats-io/nats-server/blob/main/server/errors.json
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import JetStreamError, JetStreamUnavailable, ServerUnfit

MIN_PAYLOAD = 1 << 20
RECOMMENDED_PAYLOAD = "8MB"
JETSTREAM = "jetstream { store_dir: … }"
NOT_FOR_ACCOUNT = 10039
FILES_FULL, MEMORY_FULL, RESOURCES = 10047, 10028, 10023
NO_CLUSTER = 10074


async def check_server(bus: Bus) -> None:
    """Raise ServerUnfit for unsuitable server settings, another BusError for other failures."""
    size = bus.max_payload
    if size < MIN_PAYLOAD:
        raise ServerUnfit(
            f"the NATS server accepts messages of at most {size} bytes: set max_payload in its"
            f" configuration to {RECOMMENDED_PAYLOAD}, or at least 1MB"
        )
    try:
        await bus.js.account_info()
    except JetStreamError as error:
        absent = isinstance(error, JetStreamUnavailable) and error.code == 503
        # no process listens on JetStream's subjects; in a cluster, one may soon
        if absent and error.err_code is None and not bus.client.is_clustered:
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
def explained_refusal(stream: str, size: float) -> Iterator[None]:
    """Turn a refusal of a stream of `size` bytes into a ServerUnfit that names the setting."""
    try:
        yield
    except JetStreamError as error:
        reason = _reason(error.err_code, size)
        if reason is None:
            raise
        raise ServerUnfit(f"the NATS server cannot store {stream}: {reason}") from error


def _reason(code: int | None, size: float) -> str | None:
    needed = f"needs {size / (1 << 20):.0f} MiB"
    lower = "or lower the *_bytes of [streams]"
    if code == MEMORY_FULL:
        return f"{needed}; raise max_memory_store in its configuration, {lower}"
    if code in (FILES_FULL, RESOURCES):
        return f"{needed}; raise max_file_store in its configuration, {lower}"
    if code == NO_CLUSTER:
        return "its cluster has fewer servers than nats.replicas"
    return None
