"""NATS in operator mode: keys, JWTs and .creds files, made as `nsc` makes them."""

import base64
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nkeys

DEFAULTS = {"subs": -1, "data": -1, "payload": -1}
STORAGE = {"mem_storage": 1 << 30, "disk_storage": 8 << 30, "streams": -1, "consumer": -1}


class Keys:
    """One key pair; `prefix` says of an operator, an account or a user."""

    def __init__(self, prefix: int) -> None:
        self.seed: bytes = nkeys.encode_seed(os.urandom(32), prefix)
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.public: str = self._pair.public_key.decode()

    def jwt(self, subject: str, name: str, nats: dict[str, Any], expires: float = 0) -> str:
        """A JWT about `subject`, signed by this key; `expires` in Unix time."""
        now = int(time.time())
        claims = {"jti": os.urandom(8).hex(), "iat": now, "iss": self.public, "name": name}
        claims |= {"sub": subject, "nats": {"version": 2, **nats}}
        if expires:
            claims["exp"] = int(expires)
        parts = ({"typ": "JWT", "alg": "ed25519-nkey"}, claims)
        text = ".".join(_encoded(json.dumps(part).encode()) for part in parts)
        return f"{text}.{_encoded(self._pair.sign(text.encode()))}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass
class Operator:
    """An operator with one account that has JetStream; `limits` are the account's."""

    limits: dict[str, Any] = field(default_factory=dict)
    revoked: dict[str, int] = field(default_factory=dict)  # user to time of the revocation

    def __post_init__(self) -> None:
        self._own = Keys(nkeys.PREFIX_BYTE_OPERATOR)
        self.account = Keys(nkeys.PREFIX_BYTE_ACCOUNT)
        self._system = Keys(nkeys.PREFIX_BYTE_ACCOUNT)
        self._jwt = self._own.jwt(self._own.public, "O", {"type": "operator"})

    def config(self) -> str:
        """The part of a server's configuration that names operator and accounts."""
        own = {"limits": {**DEFAULTS, "conn": -1, "leaf": -1, **STORAGE, **self.limits}}
        account: dict[str, Any] = {"type": "account", **own}
        if self.revoked:
            account["revocations"] = self.revoked
        system = {"type": "account", "limits": {**DEFAULTS, "conn": -1, "leaf": -1}}
        accounts = {
            self.account.public: self._own.jwt(self.account.public, "A", account),
            self._system.public: self._own.jwt(self._system.public, "SYS", system),
        }
        preload = "\n".join(f"  {key}: {jwt}" for key, jwt in accounts.items())
        return (
            f"operator: {self._jwt}\nsystem_account: {self._system.public}\n"
            f"resolver: MEMORY\nresolver_preload {{\n{preload}\n}}\n"
        )

    def creds(
        self, file: Path, expires: float = 0, user: Keys | None = None, **limits: object
    ) -> Keys:
        """Write the .creds file of a user; `limits` are the user's own."""
        user = user or Keys(nkeys.PREFIX_BYTE_USER)
        claims = {"type": "user", **DEFAULTS, **limits}
        jwt = self.account.jwt(user.public, "u", claims, expires)
        new = file.with_suffix(".new")
        seed = user.seed.decode()
        new.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        )
        new.replace(file)
        return user
