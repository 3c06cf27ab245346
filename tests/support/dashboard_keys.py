"""API keys and a clock for tests of the dashboard's access control."""

import hashlib
from collections.abc import Mapping

from kvmesh.frontend.auth.accounts import Accounts, Key, Scope
from kvmesh.frontend.auth.authenticator import secrets_of


class KeyRing:
    """Keys as an authenticator has read them; none means that callers need none."""

    def __init__(self, **scopes: list[Scope]) -> None:
        self.accounts = Accounts()
        self.requires_keys = bool(scopes)
        self.set(**scopes)

    def set(self, **scopes: list[Scope]) -> None:
        digests = {secret: hashlib.sha256(secret.encode()).hexdigest() for secret in scopes}
        keys = [Key(name=s, sha256=digests[s], scopes=given) for s, given in scopes.items()]
        self.accounts.replace(keys, 0.0)

    def require_scope(self, headers: Mapping[str, str], scope: Scope) -> object:
        account = self.accounts.authenticate(next(iter(secrets_of(headers)), None))
        account.require_scope(scope)
        return account


class Clock:
    """A monotonic time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
