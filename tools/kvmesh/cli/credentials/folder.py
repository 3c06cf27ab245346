"""The folder of a mesh's credentials: `authority`, `nats`, and one folder per user.

Files have mode 0600 in folders of mode 0700. Existing keys are kept; configuration and environment
files are rewritten each time.
"""

import re
import secrets
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import nkeys

from kvmesh.bus.permissions import ANY, User, inbox_prefix
from kvmesh.cli.credentials.authority import Authority, CertificatePair
from kvmesh.cli.credentials.server import Principal, ServerFiles, server_config
from kvmesh.cli.local import write_private
from kvmesh.runtime.service import bus_options
from kvmesh.settings.schema import Settings

AUTHORITY, NATS = "authority", "nats"
CA, CA_KEY, CERT, KEY = "ca.pem", "ca.key", "cert.pem", "key.pem"
SEED, ENV, CONFIG = "nkey.seed", "env", "nats.conf"
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CredentialsError(Exception):
    """The folder cannot be used; nothing was written."""


@dataclass(frozen=True)
class CredentialsPlan:
    """Contents of the folder; once deployed, each part's files are in the folder `installed`."""

    hosts: Sequence[str]
    port: int = 4222
    days: int = 365
    store: Path | None = None
    installed: Path | None = None
    monitor_port: int = 0
    principals: Sequence[Principal] = field(default_factory=tuple)


class Credentials:
    """The folder at `path`."""

    def __init__(self, path: Path, settings: Settings, plan: CredentialsPlan) -> None:
        self._path = path.absolute()
        self._settings = settings
        self._plan = plan
        self._now = datetime.now(UTC)

    def write(self, force: bool) -> list[Principal]:
        """Write missing files; return all users. Raises CredentialsError, AuthorityError, OSError.

        `force` first deletes all existing credentials, which a new authority invalidates.
        """
        self._clear(force)
        authority = self._authority()
        principals = self._principals()
        keys = [(principal, self._user(principal, authority)) for principal in principals]
        self._server(authority, keys)
        return principals

    def files_at(self, part: str) -> Path:
        """The deployed folder of a part's files."""
        return self._plan.installed or self._path / part

    def _clear(self, force: bool) -> None:
        if not self._path.exists():
            _make(self._path)
            return
        parts = [*self._users(), AUTHORITY, NATS]
        if not (self._path / AUTHORITY / CA).is_file() and any(self._path.iterdir()):
            raise CredentialsError(f"{self._path} is not empty and contains no credentials")
        for part in parts if force else ():
            shutil.rmtree(self._path / part, ignore_errors=True)
        self._path.chmod(0o700)

    def _users(self) -> list[str]:
        found = []
        for part in sorted(self._path.iterdir()) if self._path.is_dir() else ():
            try:
                found.append(Principal.parse(part.name).user)
            except ValueError:
                continue
        return found

    def _principals(self) -> list[Principal]:
        users = {*self._users(), *(principal.user for principal in self._plan.principals)}
        order = list(User)
        principals = [Principal.parse(user) for user in users]
        return sorted(
            principals, key=lambda principal: (order.index(principal.role), principal.name)
        )

    def _authority(self) -> Authority:
        folder = self._path / AUTHORITY
        if (folder / CA).is_file():
            if not (folder / CA_KEY).is_file():
                raise CredentialsError(
                    f"{folder / CA_KEY} is missing; restore it to sign certificates"
                )
            return Authority.load(
                CertificatePair((folder / CA).read_bytes(), (folder / CA_KEY).read_bytes())
            )
        _make(folder)
        authority = Authority.create(self._settings.nats.namespace, self._now)
        _put(folder / CA_KEY, authority.pair.key)
        _put(folder / CA, authority.pair.certificate)
        return authority

    def _user(self, principal: Principal, authority: Authority) -> str:
        """Write a user's files; return its public nkey."""
        folder = self._path / principal.user
        if not (folder / SEED).is_file():
            _make(folder)
            pair = authority.issue(principal.user, (), self._now, self._plan.days)
            _put(folder / CA, authority.pair.certificate)
            _put(folder / CERT, pair.certificate)
            _put(folder / KEY, pair.key)
            random = secrets.token_bytes(32)
            _put(folder / SEED, nkeys.encode_seed(random, nkeys.PREFIX_BYTE_USER))
        _put(folder / ENV, self._environment(principal).encode())
        public: bytes = nkeys.from_seed(bytearray((folder / SEED).read_bytes())).public_key
        return public.decode()

    def _environment(self, principal: Principal) -> str:
        at = self.files_at(principal.user)
        variables = {
            "KVMESH_NATS_URL": f"tls://{_address(self._plan.hosts[0], self._plan.port)}",
            "KVMESH_NATS_NAMESPACE": self._settings.nats.namespace,
            "KVMESH_NATS_TLS_CA": str(at / CA),
            "KVMESH_NATS_TLS_CERT": str(at / CERT),
            "KVMESH_NATS_TLS_KEY": str(at / KEY),
            "KVMESH_NATS_NKEY_SEED_FILE": str(at / SEED),
            "KVMESH_NATS_INBOX_PREFIX": inbox_prefix(principal.user),
        }
        for key in ("domain", "api_prefix"):
            if value := getattr(self._settings.nats, key):
                variables[f"KVMESH_NATS_{key}".upper()] = value
        if principal.name != ANY:
            variables[f"KVMESH_{principal.role}_NAME".upper()] = principal.name
        return "".join(f"{name}={shlex.quote(text)}\n" for name, text in variables.items())

    def _server(self, authority: Authority, keys: Iterable[tuple[Principal, str]]) -> None:
        plan, folder = self._plan, self._path / NATS
        _make(folder)
        pair = authority.issue("nats", plan.hosts, self._now, plan.days)
        _put(folder / CA, authority.pair.certificate)
        _put(folder / CERT, pair.certificate)
        _put(folder / KEY, pair.key)
        host = "127.0.0.1" if LOCAL.issuperset(plan.hosts) else "0.0.0.0"
        server = ServerFiles(
            namespace=self._settings.nats.namespace,
            listen=_address(host, plan.port),
            store=plan.store or self.files_at(NATS) / "jetstream",
            folder=self.files_at(NATS),
            streams=self._settings.streams,
            api=bus_options(self._settings.nats).api_prefix,
            monitor_port=plan.monitor_port,
        )
        _put(folder / CONFIG, server_config(server, keys).encode())


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def _put(file: Path, content: bytes) -> None:
    write_private(file, content.decode())
