"""Who may ask for how much: API keys, their limits, and what is left of them. Pure."""

import hashlib
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Hints, KeyUse, LimitUse
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError

MINUTE = 60.0
TOGETHER_S = 5.0  # frontends that began so close together have told each other all they did
LAPSE_S = 2.0  # a frontend that is silent for so long runs nothing any more
Limit = Annotated[int, Meta(ge=1)]
Scope = Literal["cache", "routing", "admin"]
Named = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Key(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key: `sha256` is the hash of the secret in hex. A limit of None does not limit.

    `tenant` isolates the caches of all keys that share it; None shares them with everyone. Its
    requests wait as one fair class, called `fair_class` or else as the tenant. `max_priority`
    bounds what it may say of urgency, 0 unless it is given; `max_latency_sensitivity` only that
    hint.
    `scopes` are what it may do beyond asking models: "cache" moves and drops what is cached of its
    tenant, "routing" steers the router, "admin" does all and touches what is cached of everyone.
    Until `old_until` the secret before the last rotation is good, too; from `expires` on none is
    (both Unix seconds).
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
    """A rate with a burst of one minute's worth. What was taken is owed until it has leaked away.

    More may be taken than there is room for: then nothing is let in until that much has leaked.
    """

    def __init__(self, now: float) -> None:
        self._owed = 0.0
        self._at = now

    def owed(self, per_minute: int, now: float) -> float:
        self._owed = max(0.0, self._owed - (now - self._at) * per_minute / MINUTE)
        self._at = now
        return self._owed

    def wait(self, per_minute: int, now: float) -> float:
        """Seconds until something is left; 0 if there is now."""
        missing = 1 - (per_minute - self.owed(per_minute, now))
        return max(0.0, missing / (per_minute / MINUTE))

    def take(self, amount: float) -> None:
        self._owed += amount

    def owe(self, amount: float) -> None:
        """At least this much, as somebody else knows."""
        self._owed = max(self._owed, amount)


class Heard(NamedTuple):
    """The use that another frontend last told of, and when."""

    use: KeyUse
    at: float


class Account:
    """One key's use so far: by this frontend, and as far as it has heard by the others.

    A limit is exceeded by no more than what other frontends let in and have not told of yet.
    """

    def __init__(self, key: Key, now: float, changed: "set[Account] | None" = None) -> None:
        self.key = key
        self.running = 0
        self._taken_requests = 0
        self._taken_tokens = 0
        self._requests = LeakyBucket(now)
        self._tokens = LeakyBucket(now)
        self._others: dict[str, Heard] = {}
        self._changed = changed

    def enter(self, now: float) -> "AccountEntry":
        """Begin a request of one sequence, or raise the limit that forbids it."""
        key = self.key
        self._check_concurrency(1, now)
        self._check_rate(self._requests, key.requests_per_minute, "requests", now)
        self._check_rate(self._tokens, key.tokens_per_minute, "tokens", now)
        self._taken_requests += 1
        self._requests.take(1)
        self.running += 1
        self._note()
        return AccountEntry(self)

    def _check_concurrency(self, more: int, now: float) -> None:
        most = self.key.concurrency
        if most is not None and self._all_running(now) + more > most:
            raise _too_much(f"{most} sequences at once", 1.0)

    def _check_rate(self, bucket: LeakyBucket, most: int | None, unit: str, now: float) -> None:
        if most is not None and (wait := bucket.wait(most, now)) > 0:
            raise _too_much(f"{unit} per minute", wait)

    def _all_running(self, now: float) -> int:
        heard = [h.use.running for h in self._others.values() if now - h.at < LAPSE_S]
        return self.running + sum(heard)

    def widen(self, more: int, now: float) -> None:
        """A request has `more` sequences than the one it began with."""
        most = self.key.concurrency
        if most is not None and more >= most:
            reason = f"The request has {more + 1} sequences; this key may have {most} at once."
            raise ApiError("permission", reason, code="concurrency_exceeded", param="n")
        self._check_concurrency(more, now)
        self.running += more
        self._note()

    def leave(self, sequences: int = 1) -> None:
        self.running -= sequences
        self._note()

    def spend(self, tokens: int) -> None:
        """Count tokens in or out; a request that has begun is not cut by it."""
        self._taken_tokens += tokens
        self._tokens.take(tokens)
        self._note()

    def _note(self) -> None:
        if self._changed is not None and self.key.limited:
            self._changed.add(self)

    def use(self, now: float) -> KeyUse:
        """The use to tell other frontends: its own since it began, and all that is owed."""
        requests, tokens = self.key.requests_per_minute, self.key.tokens_per_minute
        return KeyUse(
            key=self.key.sha256,
            requests=self._taken_requests,
            tokens=self._taken_tokens,
            running=self.running,
            owed_requests=0.0 if requests is None else self._requests.owed(requests, now),
            owed_tokens=0.0 if tokens is None else self._tokens.owed(tokens, now),
        )

    def idle(self, now: float) -> bool:
        """Nothing is running or owed here that another frontend would have to know."""
        use = self.use(now)
        return not (use.running or use.owed_requests or use.owed_tokens)

    def hear(self, frontend: str, use: KeyUse, now: float, newer: bool) -> None:
        """Take in another frontend's use; `newer`: it is, or began about when this one did.

        Of one that was not heard before counts what it took itself, as far as that may be owed yet;
        of an older one all that it knows to be owed: others told it what this one has missed.
        """
        before = self._others.get(frontend)
        self.use(now)  # what has come in until now comes before what is heard
        if before is not None:
            self._requests.take(max(0, use.requests - before.use.requests))
            self._tokens.take(max(0, use.tokens - before.use.tokens))
        elif newer:
            self._requests.take(min(use.requests, use.owed_requests))
            self._tokens.take(min(use.tokens, use.owed_tokens))
        else:
            self._requests.owe(use.owed_requests + self._taken_requests)
            self._tokens.owe(use.owed_tokens + self._taken_tokens)
        self._others[frontend] = Heard(use, now)

    def forget(self, frontend: str) -> None:
        """It has left."""
        self._others.pop(frontend, None)

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
        request.owner = key.sha256


class AccountEntry:
    """A request that runs on an account; it must be left once."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._sequences = 1

    def widen(self, sequences: int, now: float) -> None:
        """The request turned out to have so many sequences; raises the limit that forbids it."""
        if sequences > self._sequences:
            self._account.widen(sequences - self._sequences, now)
            self._sequences = sequences

    def leave(self) -> None:
        self._account.leave(self._sequences)
        self._sequences = 0


class Accounts:
    """All keys, by the hash of their secret. `changed` are those whose use nobody was told yet."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self.changed: set[Account] = set()

    def __len__(self) -> int:
        return len(self._accounts)

    def __iter__(self) -> Iterator[Account]:
        return iter(dict.fromkeys(self._accounts.values()))

    def replace(self, keys: list[Key], now: float) -> None:
        """Take a new list of keys; those that there were before keep what they have used."""
        held = self._accounts
        self._accounts = {}
        for key in keys:
            account = held.get(key.sha256) or held.get(key.old_sha256 or "")
            if account is None:
                account = Account(key, now, self.changed)
            account.key = key
            self._accounts[key.sha256] = account
            if key.old_sha256 is not None:
                self._accounts.setdefault(key.old_sha256, account)

    def find(self, secret: str | None, clock: float = 0.0) -> Account:
        """Raises ApiError (401) for a missing, unknown or outdated key; `clock` is in Unix s."""
        if not secret:
            raise ApiError("authentication", "An API key is required.", code="invalid_api_key")
        digest = hashlib.sha256(secret.encode()).hexdigest()
        account = self._accounts.get(digest)
        if account is None or _is_over(account.key, digest, clock):
            raise ApiError("authentication", "The API key is not valid.", code="invalid_api_key")
        return account

    def hear(self, said: LimitUse, now: float, age: float) -> None:
        """Take in what another frontend said of its use; `age` is this one's own, in seconds.

        Of keys that are not known here nothing is kept.
        """
        newer = said.age < age + TOGETHER_S
        for use in said.uses:
            if (account := self._accounts.get(use.key)) is not None:
                account.hear(said.frontend, use, now, newer)

    def forget(self, frontend: str) -> None:
        """It has left: what it let run is over."""
        for account in self:
            account.forget(frontend)


def _is_over(key: Key, digest: str, clock: float) -> bool:
    if key.expires is not None and clock >= key.expires:
        return True
    return digest != key.sha256 and clock >= key.old_until


def _too_much(what: str, wait: float) -> ApiError:
    reason = f"Rate limit reached: {what}."
    return ApiError("rate_limit", reason, code="rate_limit_exceeded", retry_after=wait)


def _capped(hints: Hints, key: Key) -> Hints:
    """No more urgent than the key may be; one that may have no priority is not sensitive either."""
    most, latency = key.max_priority or 0, key.max_latency_sensitivity
    if latency is None:
        latency = 0.0 if most <= 0 else 1.0
    return replace(
        hints,
        priority=min(hints.priority, most),
        strict_priority=min(hints.strict_priority, max(most, 0)),
        latency_sensitivity=min(hints.latency_sensitivity, latency),
    )
