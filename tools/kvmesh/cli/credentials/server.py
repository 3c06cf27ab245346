"""The configuration of a NATS server that knows every user of a mesh and what each may do."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmesh.bus.permissions import ANY, Permissions, User, permissions
from kvmesh.bus.subjects import Subjects, token
from kvmesh.cli.supervisor.nats import MAX_PAYLOAD, jetstream
from kvmesh.settings.schema import Streams

ANSWERS = 64  # to one request: an acknowledgement, the answer, and repeats of either
ANSWER_WITHIN = "10m"  # a request waits for a worker until frontend.route_timeout_s
LEVEL = "  "


@dataclass(frozen=True)
class Account:
    """Who connects: a role, and the name that its processes must have, or ANY."""

    role: User
    name: str = ANY

    @property
    def user(self) -> str:
        return self.role if self.name == ANY else f"{self.role}.{self.name}"

    @classmethod
    def parse(cls, user: str) -> "Account":
        """Raises ValueError for what is no user."""
        role, _, name = user.partition(".")
        return cls(User(role), name or ANY)


@dataclass(frozen=True)
class Server:
    """Where a server listens, keeps its streams, and finds its certificates."""

    namespace: str
    listen: str
    store: Path
    folder: Path
    streams: Streams
    monitor_port: int = 0


def server_config(server: Server, keys: Iterable[tuple[Account, str]]) -> str:
    """The whole file; `keys` has each user's public nkey."""
    return "\n".join([*_head(server), *_accounts(server.namespace, keys), ""])


def _head(server: Server) -> Iterator[str]:
    yield "# Written by `kvmesh secure`, which replaces it each time: include it, do not edit it."
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


def _accounts(namespace: str, keys: Iterable[tuple[Account, str]]) -> Iterator[str]:
    yield "accounts {"
    yield f"{LEVEL}{json.dumps(token(namespace))} {{"
    yield f"{LEVEL * 2}jetstream: enabled"
    yield f"{LEVEL * 2}users: ["
    for account, public in keys:
        yield from _user(account, public, namespace)
    yield f"{LEVEL * 2}]"
    yield f"{LEVEL}}}"
    yield "}"


def _user(account: Account, public: str, namespace: str) -> Iterator[str]:
    allowed = permissions(Subjects(namespace), account.role, account.user, account.name)
    yield f"{LEVEL * 3}# {account.user}"
    yield f"{LEVEL * 3}{{ nkey: {public}, permissions: {{"
    yield from _subjects("publish", allowed.publish)
    yield from _subjects("subscribe", allowed.subscribe)
    yield from _responses(allowed)
    yield f"{LEVEL * 3}}} }}"


def _subjects(direction: str, subjects: Iterable[str]) -> Iterator[str]:
    yield f"{LEVEL * 4}{direction}: {{ allow: ["
    for subject in subjects:
        yield f"{LEVEL * 5}{json.dumps(subject)}"
    yield f"{LEVEL * 4}] }}"


def _responses(allowed: Permissions) -> Iterator[str]:
    if allowed.responds:
        limits = f'max: {ANSWERS}, expires: "{ANSWER_WITHIN}"'
        yield f"{LEVEL * 4}allow_responses: {{ {limits} }}"
