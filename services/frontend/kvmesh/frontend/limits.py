"""Who may ask for how much: API keys, their limits, and what is left of them. Pure."""

import hashlib
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Hints
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError

MINUTE = 60.0
Limit = Annotated[int, Meta(ge=1)]
Scope = Literal["cache", "routing", "admin"]
Named = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key: `sha256` is the hash of the secret in hex. A limit of None does not limit.

    `tenant` isolates the caches of all keys that share it; None shares them with everyone. Its
    requests wait as one fair class, called `fair_class` or else as the tenant. `max_priority`
    bounds what it may say of urgency, `max_latency_sensitivity` that hint alone.
    `scopes` are what it may do beyond asking models: "cache" moves and drops what is cached of its
    tenant, "routing" steers the router, "admin" does all and touches what is cached of everyone.
    """

    name: str
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Named | None = None
    models: list[str] | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrency: Limit | None = None
    max_priority: int | None = None
    scopes: list[Scope] = []
    fair_class: Named | None = None
    max_latency_sensitivity: Annotated[float, Meta(ge=0, le=1)] | None = None


class Bucket:
    """A rate with a burst of one minute's worth; may go below zero and then has to recover."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._rate = per_minute / MINUTE
        self._most = float(per_minute)
        self._left = self._most
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until something is left; 0 if there is now."""
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        return 0.0 if self._left >= 1 else (1 - self._left) / self._rate

    def take(self, amount: float) -> None:
        self._left -= amount


class Account:
    """One key's use so far."""

    def __init__(self, key: Key, now: float) -> None:
        self.key = key
        self.running = 0
        self._requests = _bucket(key.requests_per_minute, now)
        self._tokens = _bucket(key.tokens_per_minute, now)

    def enter(self, now: float) -> None:
        """Begin a request, or raise the limit that forbids it. Leave it with `leave`."""
        key = self.key
        if key.concurrency is not None and self.running >= key.concurrency:
            raise _too_much(f"{key.concurrency} requests at once", 1.0)
        for bucket, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            wait = bucket.wait(now) if bucket is not None else 0.0
            if wait > 0:
                raise _too_much(f"{unit} per minute", wait)
        if self._requests is not None:
            self._requests.take(1)
        self.running += 1

    def leave(self) -> None:
        self.running -= 1

    def spend(self, tokens: int) -> None:
        """Count tokens in or out; a request that has begun is not cut by it."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def allow(self, model: str) -> None:
        """Raise if the key may not use the model."""
        if not self.allows(model):
            reason = f"This key may not use the model `{model}`."
            raise ApiError("permission", reason, code="model_not_allowed", param="model")

    def allows(self, model: str) -> bool:
        return self.key.models is None or model in self.key.models

    def require(self, scope: Scope) -> None:
        """Raise if the key may not do such things."""
        if scope not in self.key.scopes and "admin" not in self.key.scopes:
            reason = f"This key lacks the scope `{scope}`."
            raise ApiError("permission", reason, code="scope_missing")

    def check(self, request: GenerateRequest) -> None:
        """Raise if the model or what it says to the router is not allowed; bound its hints."""
        key = self.key
        self.allow(request.model)
        if request.steers:
            self.require("routing")
        hints = _capped(request.hints, key)
        request.hints = replace(hints, tenant=key.fair_class or key.tenant or "")


class Accounts:
    """All keys, by the hash of their secret."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def replace(self, keys: list[Key], now: float) -> None:
        """Take a new list of keys; those that did not change keep what they have used."""
        held = self._accounts
        self._accounts = {}
        for key in keys:
            old = held.get(key.sha256)
            same = old is not None and old.key == key
            self._accounts[key.sha256] = old if old and same else Account(key, now)

    def find(self, secret: str | None) -> Account:
        """Raises ApiError (401) for a missing or unknown key."""
        if not secret:
            raise ApiError("authentication", "An API key is required.", code="invalid_api_key")
        account = self._accounts.get(hashlib.sha256(secret.encode()).hexdigest())
        if account is None:
            raise ApiError("authentication", "The API key is not valid.", code="invalid_api_key")
        return account


def _bucket(per_minute: int | None, now: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now)


def _too_much(what: str, wait: float) -> ApiError:
    reason = f"Rate limit reached: {what}."
    return ApiError("rate_limit", reason, code="rate_limit_exceeded", retry_after=wait)


def _capped(hints: Hints, key: Key) -> Hints:
    """No more urgent than the key may be; one that may have no priority is not sensitive either."""
    most, latency = key.max_priority, key.max_latency_sensitivity
    if latency is None:
        latency = 0.0 if most is not None and most <= 0 else 1.0
    hints = replace(hints, latency_sensitivity=min(hints.latency_sensitivity, latency))
    if most is None:
        return hints
    priority, strict = min(hints.priority, most), min(hints.strict_priority, max(most, 0))
    return replace(hints, priority=priority, strict_priority=strict)
