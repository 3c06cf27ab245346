"""The mesh that `kvmesh up` runs on this machine: how other commands of its user reach it."""

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
    """The note that `kvmesh up` leaves in its state directory while it runs."""

    url: str
    token: str


def token_file(state_dir: Path) -> Path:
    """The file of the embedded NATS server's token."""
    return state_dir.absolute() / "nats.token"


def token(state_dir: Path) -> str:
    """The token of the embedded server, made the first time; delete its file for another one.

    Raises OSError.
    """
    file = token_file(state_dir)
    with contextlib.suppress(FileNotFoundError):
        if found := file.read_text().strip():
            return found
    made = secrets.token_hex(TOKEN_BYTES)
    write_private(file, made + "\n")
    return made


def tell(settings: Settings) -> None:
    """Say to `known` where the embedded server is; `forget` ends it. Raises OSError."""
    told = LocalMesh(settings.nats.url, settings.nats.token or "")
    write_private(_file(settings), msgspec.json.encode(told).decode())


def forget(settings: Settings) -> None:
    _file(settings).unlink(missing_ok=True)


def known(settings: Settings) -> Settings:
    """`settings`, completed for the server of `kvmesh up` if they name it, or none at all."""
    nats = settings.nats
    if any((nats.user, nats.password, nats.token, nats.credentials, nats.nkey_seed)):
        return settings
    file = _file(settings)
    try:
        if file.stat().st_uid != os.getuid():
            return settings
        told = msgspec.json.decode(file.read_bytes(), type=LocalMesh)
    except OSError:
        return settings
    except msgspec.MsgspecError as error:
        log.warning("ignored %s: %s", file, error)
        return settings
    if nats.url not in ("", told.url):
        return settings
    return replace(settings, nats=replace(nats, url=told.url, token=told.token))


def write_private(file: Path, text: str) -> None:
    """Readable by nobody else, also where a file of other rights was there before."""
    fresh = file.with_name(f".{file.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(text)
    fresh.replace(file)


def _file(settings: Settings) -> Path:
    return settings.up.state_dir.absolute() / "up.json"
