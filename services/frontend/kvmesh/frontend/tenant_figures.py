"""Use by tenant with a bounded number of names: the busiest tenants, and the rest as `other`. Pure.

A use counts under the name that its tenant has at that moment, and never moves to another name:
each series only grows while it exists, and the rates of all names add up to that of the frontend.
"""

from collections.abc import Iterator
from operator import attrgetter

from msgspec import Struct

OTHER = "other"
PUBLIC = "public"  # callers whose key names no tenant, and all callers where there are no keys
HALF_LIFE_S = 3600.0
MARGIN = 1.5  # a tenant replaces a named one once it has this many times the tokens
CANDIDATES = 8  # unnamed tenants whose tokens are known, for each named one


class TenantUse(Struct):
    """Amounts that a tenant used of one model."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_seconds: float = 0.0

    def add(self, more: "TenantUse") -> None:
        self.requests += more.requests
        self.errors += more.errors
        self.prompt_tokens += more.prompt_tokens
        self.cached_tokens += more.cached_tokens
        self.output_tokens += more.output_tokens
        self.queue_seconds += more.queue_seconds


class _Tenant(Struct):
    name: str
    tokens: float
    named: bool


class TenantFigures:
    """Counts by tenant and model; at most `limit` tenants have a name besides `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tenants: dict[str, _Tenant] = {}
        self._named = 0
        self._uses: dict[str, dict[str, TenantUse]] = {}
        self._halved_at = 0.0

    def add(self, tenant: str | None, model: str, use: TenantUse, now: float) -> None:
        """Count a use; `now` is monotonic. None is the public tenant."""
        name = self._name(tenant or PUBLIC, use.prompt_tokens + use.output_tokens, now)
        models = self._uses.get(name)
        if models is None:
            models = self._uses[name] = {}
        if (total := models.get(model)) is None:
            total = models[model] = TenantUse()
        total.add(use)

    def series(self) -> Iterator[tuple[str, str, TenantUse]]:
        """Tenant, model and the use counted so far."""
        for name, models in self._uses.items():
            for model, use in models.items():
                yield name, model, use

    def _name(self, name: str, tokens: int, now: float) -> str:
        if name == OTHER:
            return OTHER
        self._halve(now)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, 0.0, self._named < self._limit)
            self._named += tenant.named
            self._bound(tenant)
        tenant.tokens += tokens
        if not tenant.named:
            self._promote(tenant)
        return name if tenant.named else OTHER

    def _promote(self, tenant: _Tenant) -> None:
        """Give `tenant` the name of the least busy named one if it is much busier."""
        named = (each for each in self._tenants.values() if each.named)
        least = min(named, key=attrgetter("tokens"))
        if tenant.tokens > MARGIN * least.tokens:
            least.named, tenant.named = False, True
            self._uses.pop(least.name, None)

    def _bound(self, newest: _Tenant) -> None:
        """Forget the least busy unnamed tenant if too many are known."""
        if len(self._tenants) > (1 + CANDIDATES) * self._limit:
            unnamed = (t for t in self._tenants.values() if not t.named and t is not newest)
            del self._tenants[min(unnamed, key=attrgetter("tokens")).name]

    def _halve(self, now: float) -> None:
        if now - self._halved_at > HALF_LIFE_S:
            self._halved_at = now
            for tenant in self._tenants.values():
                tenant.tokens /= 2
