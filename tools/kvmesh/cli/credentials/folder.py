"""The folder of a mesh's credentials: `authority`, `nats`, and one folder per user.

Files have mode 0600 in folders of mode 0700. Existing keys are kept; configuration and environment
files are rewritten each time.
"""

import re
import secrets
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import nkeys

from kvmesh.bus.permissions import ANY, User, inbox_prefix
from kvmesh.cli.credentials.authority import Authority, CertificatePair
from kvmesh.cli.credentials.server import (
    Principal,
    Server,
    ServerFiles,
    nkey_users,
    server_config,
    token_users,
)
from kvmesh.cli.credentials.tokens import (
    NatsKey,
    Scope,
    account_token,
    credentials_file,
    new_seed,
    operator_token,
    system_token,
    user_token,
)
from kvmesh.cli.local import write_private
from kvmesh.cli.supervisor.nats import storage_bytes
from kvmesh.runtime.service import bus_options
from kvmesh.settings.schema import Settings

AUTHORITY, NATS = "authority", "nats"
CA, CA_KEY, CERT, KEY = "ca.pem", "ca.key", "cert.pem", "key.pem"
SEED, ENV, CONFIG, CREDS = "nkey.seed", "env", "nats.conf", "user.creds"
OPERATOR, OPERATOR_JWT = "operator.seed", "operator.jwt"
ACCOUNT, SYSTEM, ROUTE = "account.seed", "system.seed", "route.password"
SCOPES = "scopes"  # in `authority`: a signing key for each user
MOST_REPLICAS = 3
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CredentialsError(Exception):
    """The folder cannot be used; nothing was written."""


@dataclass(frozen=True)
class CredentialsPlan:
    """Contents of the folder; once deployed, each part's files are in the folder `installed`.

    Several `servers` are a cluster; `hosts` are further names of each. With `tokens`, users have
    JWTs of an operator, which are valid for `token_days`, or without end if that is 0.
    """

    servers: Sequence[Server]
    hosts: Sequence[str] = ()
    days: int = 365
    tokens: bool = False
    token_days: int = 0
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
        self._api = bus_options(settings.nats).api_prefix

    def write(self, force: bool) -> list[Principal]:
        """Write missing files; return all users. Raises CredentialsError, AuthorityError, OSError.

        `force` first deletes all existing credentials, which a new authority invalidates.
        """
        self._clear(force)
        authority = self._authority()
        principals = self._principals()
        keys = [(principal, self._user(principal, authority)) for principal in principals]
        if self._plan.tokens:
            users = [*self._tokens(keys)]
        else:
            users = [*nkey_users(self._settings.nats.namespace, self._api, keys)]
        for server in self._plan.servers:
            self._server(authority, server, users)
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
            _put(folder / SEED, new_seed(nkeys.PREFIX_BYTE_USER).encode())
            self._scope(principal.user).unlink(missing_ok=True)  # it signed the former .creds
        _put(folder / ENV, self._environment(principal).encode())
        return NatsKey.of((folder / SEED).read_text()).public

    def _tokens(self, keys: Sequence[tuple[Principal, str]]) -> Iterator[str]:
        """Write each user's .creds; yield the servers' lines about them."""
        folder, now = self._path / AUTHORITY, int(self._now.timestamp())
        namespace = self._settings.nats.namespace
        operator = self._key(folder / OPERATOR, nkeys.PREFIX_BYTE_OPERATOR)
        account = self._key(folder / ACCOUNT, nkeys.PREFIX_BYTE_ACCOUNT).public
        system = self._key(folder / SYSTEM, nkeys.PREFIX_BYTE_ACCOUNT).public
        _make(folder / SCOPES)
        scopes = []
        for principal, public in keys:
            key = self._key(self._scope(principal.user), nkeys.PREFIX_BYTE_ACCOUNT)
            scope = Scope(principal.user, key, principal.permissions(namespace, self._api))
            scopes.append(scope)
            token = user_token(scope, public, account, now, self._plan.token_days)
            own = self._path / principal.user
            creds = credentials_file(token, NatsKey.of((own / SEED).read_text()))
            _put(own / CREDS, creds.encode())
        disk, memory = storage_bytes(self._settings.streams)
        copies = self._replicas
        storage = (disk * copies, memory * copies)
        yield from token_users(
            self._operator_token(folder / OPERATOR_JWT, operator, system),
            system,
            {
                account: account_token(operator, account, namespace, storage, scopes, now),
                system: system_token(operator, system, now),
            },
        )

    def _scope(self, user: str) -> Path:
        """The file of the key that signs a user's JWT."""
        return self._path / AUTHORITY / SCOPES / f"{user}.seed"

    def _operator_token(self, file: Path, operator: NatsKey, system: str) -> str:
        """The operator's JWT, made once: a server reloads no configuration with another one."""
        if not file.is_file():
            name = f"kvmesh {self._settings.nats.namespace}"
            token = operator_token(operator, system, name, int(self._now.timestamp()))
            _put(file, token.encode())
        return file.read_text()

    @property
    def _replicas(self) -> int:
        """Copies of each stream: as set, or in a cluster one on each server, up to three."""
        return max(self._settings.nats.replicas, min(len(self._plan.servers), MOST_REPLICAS))

    def _key(self, file: Path, prefix: int) -> NatsKey:
        """The nkey in a file, made if missing."""
        if not file.is_file():
            _put(file, new_seed(prefix).encode())
        return NatsKey.of(file.read_text())

    def _environment(self, principal: Principal) -> str:
        at = self.files_at(principal.user)
        urls = ",".join(f"tls://{server.address}" for server in self._plan.servers)
        variables = {
            "KVMESH_NATS_URL": urls,
            "KVMESH_NATS_NAMESPACE": self._settings.nats.namespace,
            "KVMESH_NATS_TLS_CA": str(at / CA),
            "KVMESH_NATS_TLS_CERT": str(at / CERT),
            "KVMESH_NATS_TLS_KEY": str(at / KEY),
            **self._identity(at),
            "KVMESH_NATS_INBOX_PREFIX": inbox_prefix(principal.user),
        }
        for key in ("domain", "api_prefix"):
            if value := getattr(self._settings.nats, key):
                variables[f"KVMESH_NATS_{key}".upper()] = value
        if principal.name != ANY:
            variables[f"KVMESH_{principal.role}_NAME".upper()] = principal.name
        if len(self._plan.servers) > 1:
            variables["KVMESH_NATS_REPLICAS"] = str(self._replicas)
        return "".join(f"{name}={shlex.quote(text)}\n" for name, text in variables.items())

    def _identity(self, at: Path) -> dict[str, str]:
        if self._plan.tokens:
            return {"KVMESH_NATS_CREDENTIALS": str(at / CREDS)}
        return {"KVMESH_NATS_NKEY_SEED_FILE": str(at / SEED)}

    def _server(self, authority: Authority, server: Server, users: Sequence[str]) -> None:
        plan, part = self._plan, Path(NATS, server.name)
        folder, at = self._path / part, self.files_at(str(part))
        _make(self._path / NATS)
        _make(folder)
        cluster = plan.servers if len(plan.servers) > 1 else ()
        hosts = list(dict.fromkeys([server.host, *plan.hosts]))
        pair = authority.issue("nats", hosts, self._now, plan.days, member=bool(cluster))
        _put(folder / CA, authority.pair.certificate)
        _put(folder / CERT, pair.certificate)
        _put(folder / KEY, pair.key)
        files = ServerFiles(
            namespace=self._settings.nats.namespace,
            server=server,
            listen="127.0.0.1" if LOCAL.issuperset(hosts) else "0.0.0.0",
            store=plan.store or at / "jetstream",
            folder=at,
            streams=self._settings.streams,
            monitor_port=plan.monitor_port,
            cluster=cluster,
            password=self._route_password() if cluster else "",
        )
        _put(folder / CONFIG, server_config(files, users).encode())

    def _route_password(self) -> str:
        """The servers' password for each other."""
        file = self._path / AUTHORITY / ROUTE
        if not file.is_file():
            _put(file, secrets.token_urlsafe(24).encode())
        return file.read_text()


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def _put(file: Path, content: bytes) -> None:
    write_private(file, content.decode())
