"""Claims the ports and the state directory of a mesh before its processes start."""

import fcntl
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from msgspec.structs import replace

from kvmesh.cli import local
from kvmesh.cli.supervisor.errors import UpError
from kvmesh.cli.supervisor.plan import COUNTS, METRICS_ORDER, most_workers, worker_groups
from kvmesh.settings import Settings

LOOPBACK = "127.0.0.1"


def claim(settings: Settings, claims: ExitStack) -> Settings:
    """`settings` with free ports in place of 0 and the URL of the embedded NATS server, if any.

    `claims` releases them at its exit. Raises UpError naming the flag to change.
    """
    up, frontend, used = settings.up, settings.frontend, set[int]()
    if not settings.nats.url:
        claims.enter_context(_lock(up.state_dir))
        port = _claim_port(LOOPBACK, up.nats_port, "--nats-port", used)
        settings = _embedded(settings, f"nats://{LOOPBACK}:{port}")
        claims.callback(local.withdraw, settings)
    if up.frontends:
        port = _claim_port(frontend.host, frontend.port, "--port", used)
        settings = replace(settings, frontend=replace(frontend, port=port))
        for further in range(port + 1, port + up.frontends):
            _claim_port(frontend.host, further, "--port", used)
    if up.dashboard:
        own = settings.dashboard
        port = _claim_port(own.host, own.port, "--dashboard-port or use --no-dashboard", used)
        settings = replace(settings, dashboard=replace(own, port=port))
    if up.metrics_port:
        groups = worker_groups(settings)
        most = sum(most_workers(settings, g) if up.planner else g.processes for g in groups)
        processes = sum(
            most if role == "worker" else getattr(up, COUNTS[role]) for role in METRICS_ORDER
        )
        host = settings.process.metrics_host
        for number in range(processes):
            _claim_port(host, up.metrics_port + number, "--metrics-port", used)
    return settings


def _embedded(settings: Settings, url: str) -> Settings:
    """The settings for the embedded server at `url`, with its token."""
    folder = settings.up.state_dir
    try:
        token = settings.nats.token or local.token(folder)
        settings = replace(settings, nats=replace(settings.nats, url=url, token=token))
        local.publish(settings)
    except OSError as error:
        raise UpError(f"cannot use state directory {folder}: {error.strerror}") from error
    return settings


def _lock(state_dir: Path) -> TextIO:
    """Lock the state directory while the returned file is open."""
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (state_dir / "lock").open("w")
    except OSError as error:
        raise UpError(f"cannot use state directory {state_dir}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UpError(
            f"another mesh uses {state_dir}; choose another directory with --state-dir"
        ) from None
    return file


def _claim_port(host: str, port: int, flag: str, used: set[int]) -> int:
    """`port`, or any free port for 0; raises UpError naming `flag` if it is in use."""
    while True:
        found = _bind(host, port, flag)
        if found not in used:
            used.add(found)
            return found
        if port:
            raise UpError(f"port {port} is used twice; choose another with {flag}")


def _bind(host: str, port: int, flag: str) -> int:
    try:
        family = socket.getaddrinfo(
            host or None, port, flags=socket.AI_PASSIVE, type=socket.SOCK_STREAM
        )[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            found: int = probe.getsockname()[1]
            return found
    except OSError as error:
        raise UpError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another with {flag}"
        ) from error
