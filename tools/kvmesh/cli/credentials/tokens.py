"""NATS JWTs of a mesh in operator mode, and the .creds files of its users.

The permissions of each user are in the account's JWT, as a scoped signing key of its own, which
signs that user's JWT: it stays small, and new permissions need no new .creds.
Source: https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/jwt
"""

import base64
import hashlib
import json
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

import nkeys

from kvmesh.bus.permissions import Permissions

VERSION = 2
FREE = {"subs": -1, "data": -1, "payload": -1}  # no limits


class NatsKey(NamedTuple):
    """An nkey: its seed and its public form."""

    seed: str
    public: str

    @classmethod
    def of(cls, seed: str) -> "NatsKey":
        """The key of a seed; raises nkeys.NkeysError."""
        public: bytes = nkeys.from_seed(bytearray(seed.strip().encode())).public_key
        return cls(seed.strip(), public.decode())


def new_seed(prefix: int) -> str:
    """A random seed; `prefix` is one of nkeys.PREFIX_BYTE_OPERATOR, _ACCOUNT and _USER."""
    seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), prefix)
    return seed.decode()


class Scope(NamedTuple):
    """A user's name, signing key and permissions."""

    user: str
    key: NatsKey
    allowed: Permissions


def operator_token(operator: NatsKey, system: str, name: str, now: int) -> str:
    """The operator's JWT, signed by itself; `system` is the system account, `now` Unix time."""
    return _signed(operator, operator.public, name, now, "operator", system_account=system)


def system_token(operator: NatsKey, system: str, now: int) -> str:
    """The JWT of the system account, which has no users yet."""
    limits = {**FREE, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}
    return _signed(operator, system, "system", now, "account", limits=limits)


def account_token(
    operator: NatsKey,
    account: str,
    name: str,
    storage: tuple[int, int],
    scopes: Iterable[Scope],
    now: int,
) -> str:
    """The JWT of a mesh's account; `storage` are its most bytes on disk and in memory."""
    disk, memory = storage
    limits = {
        **FREE,
        "imports": -1,
        "exports": -1,
        "wildcards": True,
        "conn": -1,
        "leaf": -1,
        "disk_storage": disk,
        "mem_storage": memory,
        "streams": -1,
        "consumer": -1,
    }
    keys = [
        {
            "kind": "user_scope",
            "key": scope.key.public,
            "role": scope.user,
            "template": {
                "pub": {"allow": list(scope.allowed.publish)},
                "sub": {"allow": list(scope.allowed.subscribe)},
                **FREE,
            },
        }
        for scope in scopes
    ]
    return _signed(operator, account, name, now, "account", limits=limits, signing_keys=keys)


def user_token(scope: Scope, user: str, account: str, now: int, days: int) -> str:
    """A user's JWT, valid for `days`; 0: without end."""
    expires = {"exp": now + days * 86_400} if days else {}
    return _signed(scope.key, user, scope.user, now, "user", expires, issuer_account=account)


def credentials_file(token: str, user: NatsKey) -> str:
    """The contents of a .creds file."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )


def _signed(
    issuer: NatsKey,
    subject: str,
    name: str,
    now: int,
    kind: str,
    claims: dict[str, Any] | None = None,
    **fields: object,
) -> str:
    content = {
        "iat": now,
        "iss": issuer.public,
        "name": name,
        "sub": subject,
        **(claims or {}),
        "nats": {**fields, "type": kind, "version": VERSION},
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
    content["jti"] = base64.b32encode(digest).decode().rstrip("=")
    head = _base64(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
    text = f"{head}.{_base64(json.dumps(content).encode())}"
    pair = nkeys.from_seed(bytearray(issuer.seed.encode()))
    return f"{text}.{_base64(pair.sign(text.encode()))}"


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")
