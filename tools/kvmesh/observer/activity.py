"""Requests of the last minutes by session or tenant, in bounded memory. Pure."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from math import isfinite

from kvmesh.bus.messages import Outcome, PromptChange
from kvmesh.frontend.namespaces import own_name
from kvmesh.observer.cache_text import change_text
from kvmesh.observer.pauses import wait_text
from kvmesh.runtime.lru import LruCache

SLICES = 30  # of a window: a request leaves the sums at most so much of the window late
MAX_SESSIONS = 20_000
MAX_TENANTS = 5_000
_SUMS = (
    "requests",
    "errors",
    "prompt_tokens",
    "reused_tokens",
    "output_tokens",
    "accounted_tokens",
    "possible_tokens",
    "queue_s",
    "ttft_s",
    "first_tokens",
)


class _Sums:
    """Sums over requests; `accounted_tokens` are those of prompts with an account."""

    __slots__ = (*_SUMS, "lost")

    def __init__(self) -> None:
        self.requests = self.errors = self.first_tokens = 0
        self.prompt_tokens = self.reused_tokens = self.output_tokens = 0
        self.accounted_tokens = self.possible_tokens = 0
        self.queue_s = self.ttft_s = 0.0
        self.lost: dict[str, int] = {}

    def add(self, outcome: Outcome) -> None:
        if not outcome.choice:
            self.requests += 1
            self.errors += outcome.finish == "error"
            if outcome.ttft_s is not None and isfinite(outcome.ttft_s):
                self.ttft_s += outcome.ttft_s
                self.first_tokens += 1
        if outcome.prompt_tokens:
            self.prompt_tokens += outcome.prompt_tokens
            self.reused_tokens += outcome.cached_tokens
        self.output_tokens += outcome.output_tokens
        if isfinite(outcome.wait_s):  # a sum that is not would never be again
            self.queue_s += outcome.wait_s
        if (account := outcome.cache) is not None:
            self.accounted_tokens += account.prompt_tokens
            self.possible_tokens += account.possible
            for loss in account.losses:
                self.lost[loss.reason] = self.lost.get(loss.reason, 0) + loss.tokens

    def subtract(self, part: "_Sums") -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) - getattr(part, name))
        for reason, tokens in part.lost.items():
            self.lost[reason] -= tokens
            if not self.lost[reason]:
                del self.lost[reason]


class Activity:
    """The requests of one session or tenant that ended within the window.

    `waits_for` says in words what the session waits for since its last one.
    """

    __slots__ = (
        *("_slices", "_sums", "change", "last_seen", "session", "tenant", "waits_for", "window_s"),
    )

    def __init__(self, tenant: str, session: str, window_s: float) -> None:
        self.tenant = tenant
        self.session = session
        self.window_s = window_s
        self.last_seen = 0.0
        self.change: PromptChange | None = None
        self.waits_for = ""
        self._sums = _Sums()
        self._slices: deque[tuple[int, _Sums]] = deque()

    def add(self, outcome: Outcome, number: int, time: float) -> None:
        """Count an outcome in the slice with this number."""
        if not self._slices or self._slices[-1][0] < number:
            self._slices.append((number, _Sums()))
        self._slices[-1][1].add(outcome)
        self._sums.add(outcome)
        self.last_seen = max(self.last_seen, time)
        self.waits_for = wait_text(outcome.waits_for) if self.session else ""
        if outcome.cache is not None:
            self.change = outcome.cache.change

    def expire(self, oldest: int) -> bool:
        """Forget the slices before `oldest`; returns whether any is left."""
        while self._slices and self._slices[0][0] < oldest:
            self._sums.subtract(self._slices.popleft()[1])
        return bool(self._slices)

    @property
    def requests(self) -> int:
        return self._sums.requests

    @property
    def requests_per_min(self) -> float:
        return 60 * self._sums.requests / self.window_s

    @property
    def errors(self) -> int:
        return self._sums.errors

    @property
    def prompt_tokens(self) -> int:
        return self._sums.prompt_tokens

    @property
    def reused_tokens(self) -> int:
        return self._sums.reused_tokens

    @property
    def accounted_tokens(self) -> int:
        return self._sums.accounted_tokens

    @property
    def possible_tokens(self) -> int:
        return self._sums.possible_tokens

    @property
    def output_tokens(self) -> int:
        return self._sums.output_tokens

    @property
    def queue_s(self) -> float:
        return self._sums.queue_s

    @property
    def reused(self) -> float | None:
        """Share of the prompt tokens that engines found cached."""
        tokens = self._sums.prompt_tokens
        return self._sums.reused_tokens / tokens if tokens else None

    @property
    def possible(self) -> float | None:
        """Share of the prompt tokens that an endless cache would have held."""
        tokens = self._sums.accounted_tokens
        return self._sums.possible_tokens / tokens if tokens else None

    @property
    def lost_tokens(self) -> int:
        return sum(self._sums.lost.values())

    @property
    def lost_by_reason(self) -> Mapping[str, int]:
        """Lost tokens by the reason of their loss."""
        return self._sums.lost

    @property
    def lost_for(self) -> str:
        """The reason for which most tokens were lost."""
        lost = self._sums.lost
        return max(lost, key=lost.__getitem__) if lost else ""

    @property
    def ttft_s(self) -> float | None:
        """Mean time to the first token."""
        return self._sums.ttft_s / self._sums.first_tokens if self._sums.first_tokens else None

    @property
    def moving(self) -> str:
        """The part of the prompt in which the last turn changed, and for how many turns it has."""
        change = self.change
        if change is None:
            return ""
        text = change_text(change)
        return f"{text}, {change.turns} turns" if change.turns > 1 else text


class Activities:
    """Activities by what `key` returns; the `limit` most recent ones are kept."""

    def __init__(
        self, window_s: float, limit: int, key: Callable[[Outcome], tuple[str, str]]
    ) -> None:
        self._window_s = window_s
        self._slice_s = window_s / SLICES
        self._key = key
        self._found: LruCache[Hashable, Activity] = LruCache(limit)
        self._newest = 0

    def add(self, outcome: Outcome, time: float) -> None:
        """Count an outcome that was stored at the Unix time `time`."""
        tenant, session = group = self._key(outcome)
        activity = self._found.get(group)
        if activity is None:
            activity = Activity(tenant, session, self._window_s)
            self._found.put(group, activity)
        self._newest = max(self._newest, int(time / self._slice_s))
        activity.add(outcome, self._newest, time)

    def rows(self, now: float) -> list[Activity]:
        """The activities within the window that ends now."""
        oldest = int(now / self._slice_s) - SLICES + 1
        return list(self._live(oldest))

    def _live(self, oldest: int) -> Iterator[Activity]:
        for group in list(self._found):
            activity = self._found.peek(group)
            if activity is not None and activity.expire(oldest):
                yield activity
            else:
                self._found.pop(group)


def by_session(window_s: float) -> Activities:
    """Activities of sessions, each within its tenant."""
    return Activities(window_s, MAX_SESSIONS, lambda o: (o.tenant, own_name(o.session)))


def by_tenant(window_s: float) -> Activities:
    """Activities of tenants."""
    return Activities(window_s, MAX_TENANTS, lambda o: (o.tenant, ""))
