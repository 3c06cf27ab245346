"""The NATS server's configuration, with every user of a mesh and its permissions."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmesh.bus.permissions import ANY, User, permissions
from kvmesh.bus.subjects import API, Subjects, token
from kvmesh.cli.supervisor.nats import MAX_PAYLOAD, jetstream
from kvmesh.settings.schema import StreamSettings

LEVEL = "  "


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


@dataclass(frozen=True)
class ServerFiles:
    """Addresses and paths of a server: listener, stream store, folder of certificates."""

    namespace: str
    listen: str
    store: Path
    folder: Path
    streams: StreamSettings
    api: str = API  # the prefix of the JetStream API that holds the mesh
    monitor_port: int = 0


def server_config(server: ServerFiles, keys: Iterable[tuple[Principal, str]]) -> str:
    """The whole configuration; `keys` has each user's public nkey."""
    return "\n".join([*_head(server), *_accounts(server, keys), ""])


def _head(server: ServerFiles) -> Iterator[str]:
    yield "# Written by `kvmesh secure`, which overwrites it: include this file, do not edit it."
    yield f"listen: {json.dumps(server.listen)}"
    if server.monitor_port:
        yield f'http: "127.0.0.1:{server.monitor_port}"'
    yield f"max_payload: {MAX_PAYLOAD}"
    yield "tls {"
    for key, file in (("cert_file", "cert.pem"), ("key_file", "key.pem"), ("ca_file", "ca.pem")):
        yield f"{LEVEL}{key}: {json.dumps(str(server.folder / file))}"
    yield f"{LEVEL}verify: true"
    yield f"{LEVEL}timeout: 5"
    yield "}"
    yield jetstream(server.store, server.streams).rstrip()


def _accounts(server: ServerFiles, keys: Iterable[tuple[Principal, str]]) -> Iterator[str]:
    yield "accounts {"
    yield f"{LEVEL}{json.dumps(token(server.namespace))} {{"
    yield f"{LEVEL * 2}jetstream: enabled"
    yield f"{LEVEL * 2}users: ["
    for principal, public in keys:
        yield from _user(principal, public, server)
    yield f"{LEVEL * 2}]"
    yield f"{LEVEL}}}"
    yield "}"


def _user(principal: Principal, public: str, server: ServerFiles) -> Iterator[str]:
    subjects, role, user = Subjects(server.namespace), principal.role, principal.user
    allowed = permissions(subjects, role, user, principal.name, server.api)
    yield f"{LEVEL * 3}# {principal.user}"
    yield f"{LEVEL * 3}{{ nkey: {public}, permissions: {{"
    yield from _subjects("publish", allowed.publish)
    yield from _subjects("subscribe", allowed.subscribe)
    yield f"{LEVEL * 3}}} }}"


def _subjects(direction: str, subjects: Iterable[str]) -> Iterator[str]:
    yield f"{LEVEL * 4}{direction}: {{ allow: ["
    for subject in subjects:
        yield f"{LEVEL * 5}{json.dumps(subject)}"
    yield f"{LEVEL * 4}] }}"
