"""Connection details of the meshes that `kvmesh up` runs here, for the user's other commands.

A mesh's URL and token are in its state directory. A record in the user's runtime folder names that
directory, for commands that run in another one.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from kvmesh.settings import Settings
from kvmesh.settings.schema import NatsSettings, UpSettings

log = logging.getLogger(__name__)
TOKEN_BYTES = 32
REACH_S = 0.5
MOST_RECORDS = 100


class LocalMesh(msgspec.Struct, frozen=True):
    """The file in the state directory of `kvmesh up`, present while it runs."""

    url: str
    token: str
    namespace: str = ""


class RunningUp(msgspec.Struct, frozen=True):
    """The record of a `kvmesh up` in the runtime folder; `started` is a Unix time."""

    state_dir: str
    started: float


F = TypeVar("F", LocalMesh, RunningUp)


def token_file(state_dir: Path) -> Path:
    """The file of the embedded NATS server's token."""
    return state_dir.absolute() / "nats.token"


def token(state_dir: Path) -> str:
    """The embedded server's token, generated on first use; delete its file to replace it.

    Raises OSError.
    """
    file = token_file(state_dir)
    with contextlib.suppress(FileNotFoundError):
        if found := file.read_text().strip():
            return found
    new = secrets.token_hex(TOKEN_BYTES)
    write_private(file, new + "\n")
    return new


def publish(settings: Settings) -> None:
    """Write the embedded server's URL and token, and the record of it. Raises OSError."""
    nats, folder = settings.nats, settings.up.state_dir
    mesh = LocalMesh(nats.url, nats.token or "", nats.namespace)
    write_private(_file(folder), msgspec.json.encode(mesh).decode())
    record = RunningUp(str(folder.absolute()), time.time())
    with contextlib.suppress(OSError):  # commands elsewhere then need --state-dir
        runtime_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(_record(folder), msgspec.json.encode(record).decode())


def withdraw(settings: Settings) -> None:
    """Remove what `publish` has written."""
    for file in (_file(settings.up.state_dir), _record(settings.up.state_dir)):
        with contextlib.suppress(OSError):
            file.unlink()


def with_local_mesh(settings: Settings) -> Settings:
    """`settings` with URL and token of the local mesh, unless they name another server or user."""
    mesh = None if _names_user(settings) else _read(_file(settings.up.state_dir), LocalMesh)
    if mesh is None or settings.nats.url not in ("", mesh.url):
        return settings
    return _at(settings, mesh)


def find_mesh(settings: Settings) -> tuple[Settings, str]:
    """As `with_local_mesh`; without a mesh there, the latest one that this user runs elsewhere.

    That only if no server, state directory or user is named, and nothing else listens at the
    default URL. Then the text says which mesh was found; otherwise it is empty.
    """
    from kvmesh.runtime.service import DEFAULT_URL  # not needed by `kvmesh up`

    found = with_local_mesh(settings)
    named = settings.nats.url or settings.up.state_dir != UpSettings().state_dir
    if found is not settings or named or _names_user(settings):
        return found, ""
    meshes = running_meshes()
    default = next((each for each in meshes if each[1].url == DEFAULT_URL), None)
    if default is None and (not meshes or _listens(DEFAULT_URL)):
        return settings, ""
    folder, mesh = default or meshes[0]
    text = f"the mesh of `kvmesh up` with state in {folder}, NATS at {mesh.url}"
    if len(meshes) > 1:
        text += f"; {len(meshes) - 1} more run: name one with --state-dir"
    return _at(settings, mesh), text


def running_meshes() -> list[tuple[Path, LocalMesh]]:
    """State directory and details of the meshes that this user runs, the latest first."""
    folder = runtime_folder()
    try:
        status = folder.lstat()
        files = sorted(folder.glob("*.json"))[:MOST_RECORDS]
    except OSError:
        return []
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        return []
    records = [record for file in files if (record := _read(file, RunningUp)) is not None]
    records.sort(key=lambda record: record.started, reverse=True)
    found = (
        (Path(each.state_dir), _read(_file(Path(each.state_dir)), LocalMesh)) for each in records
    )
    return [(path, mesh) for path, mesh in found if mesh is not None and _listens(mesh.url)]


def runtime_folder() -> Path:
    """The folder of this user's records of running meshes."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    if own and Path(own).is_dir():
        return Path(own) / "kvmesh"
    return Path(tempfile.gettempdir()) / f"kvmesh-{os.getuid()}"


def _names_user(settings: Settings) -> bool:
    nats = settings.nats
    return any((nats.user, nats.password, nats.token, nats.credentials, nats.nkey_seed))


def _at(settings: Settings, mesh: LocalMesh) -> Settings:
    """`settings` for this mesh; a namespace that they name stays."""
    nats = replace(settings.nats, url=mesh.url, token=mesh.token)
    if mesh.namespace and nats.namespace == NatsSettings().namespace:
        nats = replace(nats, namespace=mesh.namespace)
    return replace(settings, nats=nats)


def _read(file: Path, form: type[F]) -> F | None:
    """The contents of a file of this user; None if there is none."""
    try:
        if file.stat().st_uid != os.getuid():
            return None
        return msgspec.json.decode(file.read_bytes(), type=form)
    except OSError:
        return None
    except msgspec.MsgspecError as error:
        log.warning("ignored %s: %s", file, error)
        return None


def _listens(url: str) -> bool:
    """A server accepts connections there; one of a killed `kvmesh up` does not."""
    address = urlsplit(url)
    try:
        place = (address.hostname or "", address.port or 0)
        socket.create_connection(place, REACH_S).close()
    except (OSError, ValueError):
        return False
    return True


def write_private(file: Path, text: str) -> None:
    """Write a file of mode 0600, replacing one of any mode; an OSError names it."""
    fresh = file.with_name(f".{file.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(text)
        fresh.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(file)) from error


def _file(state_dir: Path) -> Path:
    return state_dir.absolute() / "up.json"


def _record(state_dir: Path) -> Path:
    name = hashlib.sha256(os.fsencode(state_dir.absolute())).hexdigest()[:16]
    return runtime_folder() / f"{name}.json"
