"""Decides who may see the page: holders of a key with the scope `admin`, and their browsers."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from kvmesh.frontend.auth.accounts import Scope
from kvmesh.frontend.auth.origin_check import cross_origin_fault, form_fault
from kvmesh.frontend.errors import STATUS, ApiError
from kvmesh.runtime.lru import LruCache

COOKIE = "kvmesh_dashboard"
SIGNED_IN_S = 12 * 3600.0
MOST_SIGNED_IN = 1000
ATTEMPTS_PER_MIN = 30  # of one address: a stranger must not lock others out
MOST_ADDRESSES = 10_000
SIGN_IN, SIGN_OUT = "/sign-in", "/sign-out"


@dataclass(frozen=True)
class AccessVerdict:
    """The answer to a request: `status` 0 lets it pass, else its HTTP status and the reason."""

    status: int = 0
    reason: str = ""


PASS = AccessVerdict()
FOREIGN = AccessVerdict(403, "This page may be opened from its own address only.")


class KeyCheck(Protocol):
    """The API keys of the mesh, as an `Authenticator` holds them."""

    @property
    def requires_keys(self) -> bool: ...

    def require_scope(self, headers: Mapping[str, str], scope: Scope) -> object:
        """Raises ApiError (401, 403) unless the headers have a key with the scope."""


class Access:
    """Decides about each request. Sessions live in memory: a restart signs everyone out.

    `clock` returns seconds, monotonic. A session holds the key it began with, so a revoked or
    expired key ends it.
    """

    def __init__(self, keys: KeyCheck, local: bool, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._local = local
        self._clock = clock
        self._sessions: LruCache[str, tuple[str, float]] = LruCache(MOST_SIGNED_IN)
        self._attempts: LruCache[str, tuple[float, ...]] = LruCache(MOST_ADDRESSES)

    @property
    def requires_keys(self) -> bool:
        """True if callers need a key."""
        return self._keys.requires_keys

    def judge(
        self, method: str, headers: Mapping[str, str], websocket: bool = False
    ) -> AccessVerdict:
        """Judge a request by its headers, whose names are in lower case."""
        if websocket and not same_origin(headers):
            return FOREIGN
        if not self.requires_keys:
            fault = None
            if self._local:
                fault = cross_origin_fault(method, headers) or form_fault(method, headers)
            return PASS if fault is None else AccessVerdict(403, fault)
        secret = self._secret(headers)
        return self._judge_key(headers if secret is None else {"x-api-key": secret})

    def sign_in(self, secret: str, address: str = "") -> str | None:
        """The token of a new session; None if the key is not valid or lacks the scope.

        Raises ApiError (429) after too many attempts from the caller's `address`.
        """
        now = self._clock()
        attempts = tuple(at for at in self._attempts.peek(address) or () if now - at < 60)
        if len(attempts) >= ATTEMPTS_PER_MIN:
            raise ApiError("rate_limit", "Too many attempts; try again in a minute.")
        if self._judge_key({"x-api-key": secret.strip()}).status:
            self._attempts.put(address, (*attempts, now))
            return None
        token = secrets.token_urlsafe(32)
        self._sessions.put(token, (secret.strip(), now))
        return token

    def sign_out(self, headers: Mapping[str, str]) -> None:
        """End the caller's session."""
        self._sessions.pop(_cookie(headers))

    def _secret(self, headers: Mapping[str, str]) -> str | None:
        """The key of the caller's session, None if it has none."""
        token = _cookie(headers)
        found = self._sessions.peek(token)
        if found is None:
            return None
        secret, since = found
        if self._clock() - since > SIGNED_IN_S:
            self._sessions.pop(token)
            return None
        return secret

    def _judge_key(self, headers: Mapping[str, str]) -> AccessVerdict:
        try:
            self._keys.require_scope(headers, "admin")
        except ApiError as error:
            return AccessVerdict(STATUS[error.kind], error.message)
        return PASS


def same_site_cookie(token: str, secure: bool, age_s: float = SIGNED_IN_S) -> str:
    """The value of `Set-Cookie` for a session."""
    attributes = f"Path=/; HttpOnly; SameSite=Strict; Max-Age={age_s:.0f}"
    return f"{COOKIE}={token}; {attributes}{'; Secure' if secure else ''}"


def same_origin(headers: Mapping[str, str]) -> bool:
    """True if a page of this server has caused a request, or a program."""
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == headers.get("host", "")
    except ValueError:
        return False


def _cookie(headers: Mapping[str, str]) -> str:
    """The token of the cookie; those of other services on this host may be malformed."""
    for each in headers.get("cookie", "").split(";"):
        name, _, value = each.strip().partition("=")
        if name == COOKIE:
            return value
    return ""
