"""The NATS servers' configuration, with every user of a mesh and its permissions."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmesh.bus.permissions import ANY, Permissions, User, permissions
from kvmesh.bus.subjects import Subjects, token
from kvmesh.cli.supervisor.nats import MAX_PAYLOAD, jetstream
from kvmesh.settings.schema import StreamSettings

LEVEL = "  "
ROUTES = 2000  # between the port for clients and that for the other servers
ROUTE_USER = "route"


@dataclass(frozen=True)
class Principal:
    """One user of the NATS server: a role, and the name of its process, or ANY."""

    role: User
    name: str = ANY

    @property
    def user(self) -> str:
        return self.role if self.name == ANY else f"{self.role}.{self.name}"

    @classmethod
    def parse(cls, user: str) -> "Principal":
        """The principal of a user's name; raises ValueError if invalid."""
        role, _, name = user.partition(".")
        return cls(User(role), name or ANY)

    def permissions(self, namespace: str, api: str) -> Permissions:
        return permissions(Subjects(namespace), self.role, self.user, self.name, api)


@dataclass(frozen=True)
class Server:
    """One server: host and port for clients. `name` is unique in its cluster."""

    host: str
    port: int
    name: str = ""

    @property
    def address(self) -> str:
        return _address(self.host, self.port)

    @property
    def route(self) -> str:
        """Host and port for the other servers of the cluster."""
        return _address(self.host, self.port + ROUTES)


@dataclass(frozen=True)
class ServerFiles:
    """Addresses and paths of a server: address, stream store, folder of certificates.

    `listen` is the address of the interface on which it listens. It joins the `cluster` with its
    other servers by `password`.
    """

    namespace: str
    server: Server
    listen: str
    store: Path
    folder: Path
    streams: StreamSettings
    monitor_port: int = 0
    cluster: Sequence[Server] = ()
    password: str = ""


def server_config(server: ServerFiles, users: Iterable[str]) -> str:
    """The whole configuration; `users` are the lines that authenticate them."""
    return "\n".join([*_head(server), *_cluster(server), *users, ""])


def nkey_users(namespace: str, api: str, keys: Iterable[tuple[Principal, str]]) -> Iterator[str]:
    """The account and its users, each with its public nkey.

    `api` is the prefix of the JetStream API that holds the mesh.
    """
    yield "accounts {"
    yield f"{LEVEL}{json.dumps(token(namespace))} {{"
    yield f"{LEVEL * 2}jetstream: enabled"
    yield f"{LEVEL * 2}users: ["
    for principal, public in keys:
        allowed = principal.permissions(namespace, api)
        yield f"{LEVEL * 3}# {principal.user}"
        yield f"{LEVEL * 3}{{ nkey: {public}, permissions: {{"
        yield from _subjects("publish", allowed.publish)
        yield from _subjects("subscribe", allowed.subscribe)
        yield f"{LEVEL * 3}}} }}"
    yield f"{LEVEL * 2}]"
    yield f"{LEVEL}}}"
    yield "}"


def token_users(operator: str, system: str, accounts: dict[str, str]) -> Iterator[str]:
    """Operator mode: the operator's JWT, the system account, and each account's JWT by its key."""
    yield f"operator: {operator}"
    yield f"system_account: {system}"
    yield "resolver: MEMORY"
    yield "resolver_preload {"
    for public, account in accounts.items():
        yield f"{LEVEL}{public}: {account}"
    yield "}"


def _head(files: ServerFiles) -> Iterator[str]:
    yield "# Written by `kvmesh secure`, which overwrites it: include this file, do not edit it."
    yield f"listen: {json.dumps(_address(files.listen, files.server.port))}"
    if files.server.name:
        yield f"server_name: {json.dumps(files.server.name)}"
    if files.monitor_port:
        yield f'http: "127.0.0.1:{files.monitor_port}"'
    yield f"max_payload: {MAX_PAYLOAD}"
    yield from _tls(files)
    yield jetstream(files.store, files.streams).rstrip()


def _cluster(files: ServerFiles) -> Iterator[str]:
    """Routes between the servers: the certificate of any user would pass their TLS."""
    if not files.cluster:
        return
    server = files.server
    routes = [
        f"tls://{ROUTE_USER}:{files.password}@{other.route}"
        for other in files.cluster
        if other != server
    ]
    yield "cluster {"
    yield f"{LEVEL}name: {json.dumps(token(files.namespace))}"
    yield f"{LEVEL}listen: {json.dumps(_address(files.listen, server.port + ROUTES))}"
    yield f"{LEVEL}authorization {{ user: {ROUTE_USER}, password: {json.dumps(files.password)} }}"
    yield f"{LEVEL}no_advertise: true"
    yield f"{LEVEL}routes: {json.dumps(routes)}"
    yield from (LEVEL + line for line in _tls(files))
    yield "}"


def _tls(files: ServerFiles) -> Iterator[str]:
    yield "tls {"
    for key, file in (("cert_file", "cert.pem"), ("key_file", "key.pem"), ("ca_file", "ca.pem")):
        yield f"{LEVEL}{key}: {json.dumps(str(files.folder / file))}"
    yield f"{LEVEL}verify: true"
    yield f"{LEVEL}timeout: 5"
    yield "}"


def _subjects(direction: str, subjects: Iterable[str]) -> Iterator[str]:
    yield f"{LEVEL * 4}{direction}: {{ allow: ["
    for subject in subjects:
        yield f"{LEVEL * 5}{json.dumps(subject)}"
    yield f"{LEVEL * 4}] }}"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
