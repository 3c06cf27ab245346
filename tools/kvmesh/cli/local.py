"""Connection details of the mesh that `kvmesh up` runs here, for the user's other commands."""

import contextlib
import logging
import os
import secrets
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvmesh.settings import Settings

log = logging.getLogger(__name__)
TOKEN_BYTES = 32


class LocalMesh(msgspec.Struct, frozen=True):
    """The file in the state directory of `kvmesh up`, present while it runs."""

    url: str
    token: str


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
    """Write the embedded server's URL and token for `with_local_mesh`. Raises OSError."""
    mesh = LocalMesh(settings.nats.url, settings.nats.token or "")
    write_private(_file(settings), msgspec.json.encode(mesh).decode())


def withdraw(settings: Settings) -> None:
    _file(settings).unlink(missing_ok=True)


def with_local_mesh(settings: Settings) -> Settings:
    """`settings` with URL and token of the local mesh, unless they name another server or user."""
    nats = settings.nats
    if any((nats.user, nats.password, nats.token, nats.credentials, nats.nkey_seed)):
        return settings
    file = _file(settings)
    try:
        if file.stat().st_uid != os.getuid():
            return settings
        mesh = msgspec.json.decode(file.read_bytes(), type=LocalMesh)
    except OSError:
        return settings
    except msgspec.MsgspecError as error:
        log.warning("ignored %s: %s", file, error)
        return settings
    if nats.url not in ("", mesh.url):
        return settings
    return replace(settings, nats=replace(nats, url=mesh.url, token=mesh.token))


def write_private(file: Path, text: str) -> None:
    """Write a file of mode 0600, replacing one of any mode."""
    fresh = file.with_name(f".{file.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)
    fresh.replace(file)


def _file(settings: Settings) -> Path:
    return settings.up.state_dir.absolute() / "up.json"
