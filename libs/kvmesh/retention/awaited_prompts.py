"""Prompts that have ended, what is expected of each, and whether it has returned."""

import heapq
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import inf, isfinite
from typing import Generic, TypeVar

from msgspec.structs import replace

from kvmesh.bus.messages import ReturnForecast, session_owner
from kvmesh.returns.rates import BINS, age_bin, unpack_rates
from kvmesh.returns.value import chances_by_age, values_by_age

log = logging.getLogger(__name__)
P = TypeVar("P")
MAX_PROMPTS = 8192
MAX_EARLY = 1024
MAX_PER_SESSION = 64
MAX_EXPECTED = 4  # expectations of one run of blocks
APPLIED, UNKNOWN, MALFORMED = "applied", "unknown", "malformed"
RESULTS = (APPLIED, UNKNOWN, MALFORMED)
HELD, EVICTED = "held", "evicted"


class Expectation:
    """The expected return of one prompt: `values` in returns per second by age since `since`.

    `chances` are the probabilities that it returns at all, by age. `over` is set once the prompt
    has returned or its session has ended. `evicted` counts the blocks that were evicted meanwhile.
    """

    __slots__ = ("chances", "evicted", "over", "since", "values")

    def __init__(
        self, since: float, values: tuple[float, ...], chances: tuple[float, ...] = (1.0,) * BINS
    ) -> None:
        self.since = since
        self.values = values
        self.chances = chances
        self.over = False
        self.evicted = 0

    def value(self, now: float) -> float:
        """The value at `now`."""
        return 0.0 if self.over else self.values[age_bin(now - self.since)]

    def chance(self, now: float) -> float:
        """The probability that the prompt returns after `now`."""
        return 0.0 if self.over else self.chances[age_bin(now - self.since)]


class AwaitedPrompt(Generic[P]):
    """An ended prompt with its answer: `blocks` full blocks, of which `last` is the last hash.

    `place` is where its owner finds the blocks. `forecast`: a forecast says what is expected.
    """

    __slots__ = (
        "blocks",
        "expectation",
        "forecast",
        "last",
        "place",
        "request",
        "session",
    )

    def __init__(
        self,
        request: str,
        session: str | None,
        blocks: int,
        last: Hashable,
        place: P,
    ) -> None:
        self.request = request
        self.session = session
        self.blocks = blocks
        self.last = last
        self.place = place
        self.expectation: Expectation | None = None
        self.forecast = False

    def is_in(self, prompt: Sequence[Hashable]) -> bool:
        """True if a prompt, given by its hashes, continues this one or is equal to it."""
        return len(prompt) >= self.blocks and prompt[self.blocks - 1] == self.last


class AwaitedPrompts(Generic[P]):
    """The latest ended prompts, and forecasts for requests that have not ended.

    The prompts are at most `max_prompts`, of `max_blocks` blocks in all. MAX_EARLY forecasts wait
    for the end of their request. A forecast holds until a
    prompt of the same session continues its prompt, or until the session gives that up or ends.
    `results` counts forecasts by what came of them first, and `returns` the prompts with a forecast
    that returned, by what had become of their blocks.
    """

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_blocks: float = inf) -> None:
        self.results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        self.returns: Counter[str] = Counter({HELD: 0, EVICTED: 0})
        self._max_prompts = max_prompts
        self._max_blocks = max_blocks
        self._blocks = 0
        self._ended: OrderedDict[str, AwaitedPrompt[P]] = OrderedDict()
        self._by_session: dict[str, dict[str, AwaitedPrompt[P]]] = {}
        self._early: OrderedDict[str, ReturnForecast] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def end(self, prompt: AwaitedPrompt[P]) -> bool:
        """Record the end of a request; True if an early forecast now applies to it."""
        known = self._ended.get(prompt.request)
        if known is not None:
            self._forget(known)
        self._ended[prompt.request] = prompt
        self._blocks += prompt.blocks
        if prompt.session is not None:
            of_session = self._by_session.setdefault(prompt.session, {})
            of_session[prompt.request] = prompt
            if len(of_session) > MAX_PER_SESSION:
                self._forget(next(iter(of_session.values())))
        while len(self._ended) > self._max_prompts or self._blocks > self._max_blocks:
            self._forget(next(iter(self._ended.values())))
        early = self._early.pop(prompt.request, None) if self._early else None
        return early is not None and self._expect(prompt, early)

    def grow(self, prompt: AwaitedPrompt[P]) -> bool:
        """Record more of a request's prompt: what was expected of its part is of the whole.

        True if an early forecast now applies to it.
        """
        known = self._ended.get(prompt.request)
        if known is not None:
            prompt.expectation, prompt.forecast = known.expectation, known.forecast
        return self.end(prompt)

    def expectation(self, request: str) -> Expectation | None:
        """The expectation of the prompt of a request, if there is one."""
        prompt = self._ended.get(request)
        return None if prompt is None else prompt.expectation

    def expect(self, forecast: ReturnForecast) -> AwaitedPrompt[P] | None:
        """Apply a forecast, with `since` on the caller's clock; returns its prompt.

        None if it has no effect now.
        """
        prompt = self._ended.get(forecast.request)
        if prompt is not None:
            return prompt if self._expect(prompt, forecast) else None
        if self._rates(forecast) is not None:
            self.results[UNKNOWN] += 1
            self._early.pop(forecast.request, None)
            self._early[forecast.request] = forecast
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
        return None

    def likeliest(
        self, count: int, now: float, wanted: Callable[[str], bool]
    ) -> list[tuple[float, P]]:
        """The values and places of at most so many prompts with a forecast, the highest first.

        `wanted(tenant)` is true of the tenants to consider, for prompts of a session.
        """
        found: list[tuple[float, int, P]] = []
        known: dict[str, bool] = {}
        for number, prompt in enumerate(self._ended.values()):
            if prompt.expectation is not None and prompt.forecast:
                value = prompt.expectation.value(now)
                if value > 0.0 and _wants(prompt.session, wanted, known):
                    found.append((value, number, prompt.place))
        best = heapq.nlargest(count, found, key=_value_and_number)
        return [(value, place) for value, _, place in best]

    def on_prompt(
        self,
        session: str | None,
        prompts: Iterable[Sequence[Hashable]],
        request: str | None = None,
    ) -> None:
        """Note the new prompt of a session, and those that it gives up, each by its hashes.

        The prompt of `request`, the session's own, returns by later requests only.
        """
        awaited = self._by_session.get(session) if session is not None else None
        if not awaited:
            return
        for prompt in prompts:
            for one in [one for one in awaited.values() if one.is_in(prompt)]:
                if one.request == request:
                    continue
                self._end(one)
                if one.expectation is not None and one.forecast:
                    self.returns[EVICTED if one.expectation.evicted else HELD] += 1

    def release(self, sessions: Iterable[str]) -> None:
        """Expect nothing of sessions any more."""
        for session in sessions:
            for one in list(self._by_session.get(session, {}).values()):
                self._end(one)

    def _end(self, prompt: AwaitedPrompt[P]) -> None:
        self._forget(prompt)
        if prompt.expectation is not None:
            prompt.expectation.over = True

    def _expect(self, prompt: AwaitedPrompt[P], forecast: ReturnForecast) -> bool:
        rates = self._rates(forecast)
        if rates is None:
            return False
        self.results[APPLIED] += 1
        prompt.forecast = any(rates)
        values, chances, known = values_by_age(rates), chances_by_age(rates), prompt.expectation
        if known is None:
            prompt.expectation = Expectation(forecast.since, values, chances)
        else:
            known.since, known.values, known.chances = forecast.since, values, chances
        return True

    def _rates(self, forecast: ReturnForecast) -> tuple[float, ...] | None:
        """The rates of a forecast; None if it is malformed."""
        try:
            rates = unpack_rates(forecast.rates)
        except ValueError as error:
            self._refuse(forecast, str(error))
            return None
        if not isfinite(forecast.since):
            self._refuse(forecast, f"it counts from {forecast.since}")
            return None
        return rates

    def _refuse(self, forecast: ReturnForecast, reason: str) -> None:
        self.results[MALFORMED] += 1
        if self.results[MALFORMED] == 1:
            log.warning("the forecast for request %s is malformed: %s", forecast.request, reason)

    def _forget(self, prompt: AwaitedPrompt[P]) -> None:
        del self._ended[prompt.request]
        self._blocks -= prompt.blocks
        of_session = self._by_session.get(prompt.session) if prompt.session is not None else None
        if of_session is not None:
            del of_session[prompt.request]
            if not of_session and prompt.session is not None:
                del self._by_session[prompt.session]


def _wants(session: str | None, wanted: Callable[[str], bool], known: dict[str, bool]) -> bool:
    if session is None:
        return True
    tenant = session_owner(session)
    found = known.get(tenant)
    if found is None:
        found = known[tenant] = wanted(tenant)
    return found


def _value_and_number(item: tuple[float, int, P]) -> tuple[float, int]:
    return item[0], item[1]


def still_expected(expected: Sequence[Expectation]) -> tuple[Expectation, ...]:
    """Those of the expectations that are not over."""
    return tuple([one for one in expected if not one.over])


def chance_of_return(expected: Iterable[Expectation], now: float) -> float:
    """The probability that at least one of these returns comes after `now`; 1 without any."""
    left, known = 1.0, False
    for one in expected:
        left *= 1.0 - one.chance(now)
        known = True
    return 1.0 - left if known else 1.0


def with_expectation(
    expected: Sequence[Expectation], new: Expectation, now: float
) -> tuple[Expectation, ...]:
    """Expectations of a run with a new one; of too many, the one of the lowest value is dropped."""
    if new in expected:
        return still_expected(expected)
    kept = still_expected(expected)
    if len(kept) >= MAX_EXPECTED:
        least = min(kept, key=lambda one: one.value(now))
        kept = tuple([one for one in kept if one is not least])
    return (*kept, new)


def on_clock(
    forecasts: Iterable[ReturnForecast], unix_now: float, now: float
) -> list[ReturnForecast]:
    """Forecasts whose `since` is not Unix time but on a clock that says `now`.

    A sender's clock may be ahead: no forecast counts from a later time than now.
    """
    offset = now - unix_now
    return [replace(one, since=min(one.since + offset, now)) for one in forecasts]
