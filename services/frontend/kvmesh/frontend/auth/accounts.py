"""API keys, their limits, and the use that counts against them. Pure."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Hints, KeyUse, LimitUse
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError

MINUTE = 60.0
SAME_START_S = 5.0  # frontends started within this time received all of each other's reports
PEER_TIMEOUT_S = 2.0  # sequences of a frontend that is silent for longer are not counted
Limit = Annotated[int, Meta(ge=1)]
Scope = Literal["cache", "routing", "admin"]
Named = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key; `sha256` is the hex digest of its secret. A limit of None is no limit.

    - `tenant`: namespace of the caches, shared by all keys of the tenant; None is the public one.
    - `fair_class`: class of its requests in the router's queue; the tenant if None.
    - `max_priority`: upper bound of the priority hints, 0 if None. `max_latency_sensitivity` bounds
      that hint alone.
    - `scopes`: permissions beyond inference. "cache" controls the tenant's cache, "routing" the
      router's choice; "admin" includes both and the caches of all tenants.
    - `old_sha256` is valid until `old_until`, the key until `expires` (Unix seconds).
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
    expires: float | None = None
    old_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    old_until: float = 0.0

    @property
    def limited(self) -> bool:
        limits = (self.requests_per_minute, self.tokens_per_minute, self.concurrency)
        return any(limit is not None for limit in limits)


class LeakyBucket:
    """Rate limit with a burst of one minute's worth; the level leaks at the permitted rate.

    The level may exceed the burst: then no request is admitted until the excess has leaked.
    """

    def __init__(self, now: float) -> None:
        self._level = 0.0
        self._at = now

    def level(self, per_minute: int, now: float) -> float:
        self._level = max(0.0, self._level - (now - self._at) * per_minute / MINUTE)
        self._at = now
        return self._level

    def wait_s(self, per_minute: int, now: float) -> float:
        """Seconds until one unit is free; 0 if one is free now."""
        missing = 1 - (per_minute - self.level(per_minute, now))
        return max(0.0, missing / (per_minute / MINUTE))

    def add(self, amount: float) -> None:
        self._level += amount

    def raise_to(self, level: float) -> None:
        """Adopt a higher level reported by another frontend."""
        self._level = max(self._level, level)


class PeerUse(NamedTuple):
    """Last use reported by another frontend, and its arrival time."""

    use: KeyUse
    at: float


class Account:
    """One key's use: by this frontend, and by the others as last reported.

    A limit is exceeded at most by what other frontends have admitted but not reported yet.
    """

    def __init__(self, key: Key, now: float, changed: "set[Account] | None" = None) -> None:
        self.key = key
        self.running = 0
        self._used_requests = 0
        self._used_tokens = 0
        self._reported = 0, 0  # of these
        self._requests = LeakyBucket(now)
        self._tokens = LeakyBucket(now)
        self._peers: dict[str, PeerUse] = {}
        self._changed = changed

    def enter(self, now: float) -> "AccountEntry":
        """Admit a request of one sequence; raises ApiError (429) at a limit."""
        key = self.key
        self._check_concurrency(1, now)
        self._check_rate(self._requests, key.requests_per_minute, "requests", now)
        self._check_rate(self._tokens, key.tokens_per_minute, "tokens", now)
        self._used_requests += 1
        self._requests.add(1)
        self.running += 1
        self._mark_changed()
        return AccountEntry(self)

    def _check_concurrency(self, more: int, now: float) -> None:
        limit = self.key.concurrency
        if limit is not None and self._all_running(now) + more > limit:
            raise _limit_reached(f"{limit} concurrent sequences", 1.0)

    def _check_rate(self, bucket: LeakyBucket, limit: int | None, unit: str, now: float) -> None:
        if limit is not None and (wait := bucket.wait_s(limit, now)) > 0:
            raise _limit_reached(f"{unit} per minute", wait)

    def _all_running(self, now: float) -> int:
        reports = self._peers.values()
        recent = [peer.use.running for peer in reports if now - peer.at < PEER_TIMEOUT_S]
        return self.running + sum(recent)

    def add_sequences(self, more: int, now: float) -> None:
        """Count `more` sequences of an admitted request; raises ApiError (403, 429) at a limit."""
        limit = self.key.concurrency
        if limit is not None and more >= limit:
            reason = f"The request has {more + 1} sequences; this key allows {limit} at a time."
            raise ApiError("permission", reason, code="concurrency_exceeded", param="n")
        self._check_concurrency(more, now)
        self.running += more
        self._mark_changed()

    def leave(self, sequences: int = 1) -> None:
        self.running -= sequences
        self._mark_changed()

    def charge_tokens(self, tokens: int) -> None:
        """Count prompt or output tokens; a running request continues beyond the limit."""
        self._used_tokens += tokens
        self._tokens.add(tokens)
        self._mark_changed()

    def _mark_changed(self) -> None:
        if self._changed is not None and self.key.limited:
            self._changed.add(self)

    def report(self, now: float) -> KeyUse:
        """Its use, for other frontends."""
        self._reported = self._used_requests, self._used_tokens
        return self.use(now)

    def use(self, now: float) -> KeyUse:
        """The own totals since start, and the levels of the buckets."""
        requests, tokens = self.key.requests_per_minute, self.key.tokens_per_minute
        return KeyUse(
            key=self.key.sha256,
            requests=self._used_requests,
            tokens=self._used_tokens,
            running=self.running,
            owed_requests=0.0 if requests is None else self._requests.level(requests, now),
            owed_tokens=0.0 if tokens is None else self._tokens.level(tokens, now),
        )

    def idle(self, now: float) -> bool:
        """True if nothing runs and both buckets are empty, so that no report is needed."""
        use = self.use(now)
        return not (use.running or use.owed_requests or use.owed_tokens)

    def merge(self, frontend: str, use: KeyUse, now: float, newer: bool) -> None:
        """Count another frontend's use; `newer`: it started after this one or at about that time.

        The first report of a newer frontend adds that frontend's own use, minus what has leaked.
        The first report of an older one raises the levels to that frontend's, and to what this one
        has not reported yet: they include reports of third frontends that this one has missed, and
        this one's.
        """
        before = self._peers.get(frontend)
        self.use(now)  # leak at the rates until now before adding
        if before is not None:
            self._requests.add(max(0, use.requests - before.use.requests))
            self._tokens.add(max(0, use.tokens - before.use.tokens))
        elif newer:
            self._requests.add(min(use.requests, use.owed_requests))
            self._tokens.add(min(use.tokens, use.owed_tokens))
        else:
            requests, tokens = self._reported
            self._requests.raise_to(use.owed_requests + self._used_requests - requests)
            self._tokens.raise_to(use.owed_tokens + self._used_tokens - tokens)
        self._peers[frontend] = PeerUse(use, now)

    def remove_frontend(self, frontend: str) -> None:
        """Drop the report of a frontend that has left."""
        self._peers.pop(frontend, None)

    def require_model(self, model: str) -> None:
        """Raises ApiError (403) for a model that the key may not use."""
        if not self.allows_model(model):
            reason = f"This key may not use the model `{model}`."
            raise ApiError("permission", reason, code="model_not_allowed", param="model")

    def allows_model(self, model: str) -> bool:
        return self.key.models is None or model in self.key.models

    def require_scope(self, scope: Scope) -> None:
        """Raises ApiError (403) if the key lacks the scope."""
        if scope not in self.key.scopes and "admin" not in self.key.scopes:
            reason = f"This key lacks the scope `{scope}`."
            raise ApiError("permission", reason, code="scope_missing")

    def authorize(self, request: GenerateRequest) -> None:
        """Bound the request's hints by the key; raises ApiError (403) for model or routing."""
        key = self.key
        self.require_model(request.model)
        if request.steers_routing:
            self.require_scope("routing")
        hints = _capped(request.hints, key)
        request.hints = replace(hints, tenant=key.fair_class or key.tenant or "")
        request.owner = key.sha256


class AccountEntry:
    """An admitted request of an account; `leave` is called once."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._sequences = 1

    def add_sequences(self, sequences: int, now: float) -> None:
        """Set the number of sequences once it is parsed; raises ApiError (403, 429) at a limit."""
        if sequences > self._sequences:
            self._account.add_sequences(sequences - self._sequences, now)
            self._sequences = sequences

    def leave(self) -> None:
        self._account.leave(self._sequences)
        self._sequences = 0


class ChangedAccounts(set[Account]):
    """Accounts with unreported use; `on_first` is called when the first one is added."""

    def __init__(self) -> None:
        super().__init__()
        self.on_first: Callable[[], None] = lambda: None

    def add(self, account: Account) -> None:
        if not self:
            self.on_first()
        super().add(account)


class Accounts:
    """Accounts by the hash of their secret; `changed` holds those with unreported use."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self.changed = ChangedAccounts()

    def __len__(self) -> int:
        return len(self._accounts)

    def __iter__(self) -> Iterator[Account]:
        return iter(dict.fromkeys(self._accounts.values()))

    def replace(self, keys: list[Key], now: float) -> None:
        """Replace the list of keys; a key that was in the old list retains its use."""
        old = self._accounts
        self._accounts = {}
        for key in keys:
            account = old.get(key.sha256) or old.get(key.old_sha256 or "")
            if account is None:
                account = Account(key, now, self.changed)
            account.key = key
            self._accounts[key.sha256] = account
            if key.old_sha256 is not None:
                self._accounts.setdefault(key.old_sha256, account)

    def authenticate(self, secret: str | None, clock: float = 0.0) -> Account:
        """The account of a secret at Unix time `clock`; raises ApiError (401) if not valid."""
        if not secret:
            raise ApiError("authentication", "An API key is required.", code="invalid_api_key")
        digest = hashlib.sha256(secret.encode()).hexdigest()
        account = self._accounts.get(digest)
        if account is None or _has_expired(account.key, digest, clock):
            raise ApiError("authentication", "The API key is not valid.", code="invalid_api_key")
        return account

    def of_key(self, digest: str, clock: float) -> Account:
        """The account of the key with this hash at Unix time `clock`; raises ApiError (401)."""
        account = self._accounts.get(digest)
        if account is None or _has_expired(account.key, account.key.sha256, clock):
            raise ApiError("authentication", "The API key is gone.", code="invalid_api_key")
        return account

    def receive(self, report: LimitUse, now: float, age: float) -> None:
        """Count another frontend's use; `age` of this frontend in seconds. Ignores unknown keys."""
        newer = report.age < age + SAME_START_S
        for use in report.uses:
            if (account := self._accounts.get(use.key)) is not None:
                account.merge(report.frontend, use, now, newer)

    def remove_frontend(self, frontend: str) -> None:
        """Stop counting the running sequences of a frontend that has left."""
        for account in self:
            account.remove_frontend(frontend)


def _has_expired(key: Key, digest: str, clock: float) -> bool:
    if key.expires is not None and clock >= key.expires:
        return True
    return digest != key.sha256 and clock >= key.old_until


def _limit_reached(limit: str, wait: float) -> ApiError:
    reason = f"Rate limit reached: {limit}."
    return ApiError("rate_limit", reason, code="rate_limit_exceeded", retry_after=wait)


def _capped(hints: Hints, key: Key) -> Hints:
    """Bound the priority hints; latency sensitivity needs a positive `max_priority` or its own."""
    max_priority, latency = key.max_priority or 0, key.max_latency_sensitivity
    if latency is None:
        latency = 0.0 if max_priority <= 0 else 1.0
    return replace(
        hints,
        priority=min(hints.priority, max_priority),
        strict_priority=min(hints.strict_priority, max(max_priority, 0)),
        latency_sensitivity=min(hints.latency_sensitivity, latency),
    )
