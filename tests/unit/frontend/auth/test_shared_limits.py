"""Limits shared by several frontends, under random delays of their reports."""

import hashlib
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest

from kvmesh.bus.messages import KeyUse, LimitUse
from kvmesh.frontend.auth.accounts import PEER_TIMEOUT_S, AccountEntry, Accounts, Key, LeakyBucket
from kvmesh.frontend.auth.shared_limits import HEARTBEAT_S, INTERVAL_S
from kvmesh.frontend.errors import ApiError

DELAY_S = 0.03  # longest delay of a report
LATEST_S = INTERVAL_S + DELAY_S  # longest time until all other frontends count a use
SECRET = "s"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


def key(requests_per_minute: int | None = None, concurrency: int | None = None) -> Key:
    limits = {"requests_per_minute": requests_per_minute, "concurrency": concurrency}
    return msgspec.convert({"name": "k", "sha256": DIGEST, **limits}, Key)


@dataclass
class Report:
    due: float
    frontend: str
    uses: list[KeyUse]


@dataclass
class Simulated:
    """One frontend that reports like `SharedLimits`; `entries` are its running requests."""

    name: str
    accounts: Accounts
    reported: float = 0.0
    reported_all: float = 0.0
    entries: list[AccountEntry] = field(default_factory=list)
    admitted: list[float] = field(default_factory=list)

    def report(self, now: float) -> list[KeyUse]:
        if now - self.reported_all >= HEARTBEAT_S:
            accounts = [a for a in self.accounts if a in self.accounts.changed or not a.idle(now)]
            self.reported_all = now
        elif now - self.reported >= INTERVAL_S:
            accounts = list(self.accounts.changed)
        else:
            return []
        self.reported = now
        self.accounts.changed.clear()
        return [account.report(now) for account in accounts]


class World:
    """Frontends in steps of about a millisecond; reports take random times and keep their order."""

    def __init__(self, seed: int, count: int, limits: Key) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.frontends = [self._made(f"f{n}", limits) for n in range(count)]
        self.in_flight: list[tuple[Simulated, Report]] = []

    def _made(self, name: str, limits: Key) -> Simulated:
        accounts = Accounts()
        accounts.replace([limits], 0.0)
        return Simulated(name, accounts)

    def step(self) -> None:
        self.now += self.rng.random() * 0.002
        for frontend in self.frontends:
            if uses := frontend.report(self.now):
                for other in self.frontends:
                    if other is not frontend:
                        due = self.now + self.rng.random() * (DELAY_S - 0.003)
                        due = max([due, *self._dues(frontend, other)])
                        self.in_flight.append((other, Report(due, frontend.name, uses)))
        arrived = [entry for entry in self.in_flight if entry[1].due <= self.now]
        self.in_flight = [entry for entry in self.in_flight if entry[1].due > self.now]
        for frontend, report in sorted(arrived, key=lambda entry: entry[1].due):
            self.receive(frontend, report.frontend, report.uses)

    def _dues(self, one: Simulated, to: Simulated) -> list[float]:
        return [
            report.due
            for other, report in self.in_flight
            if (other, report.frontend) == (to, one.name)
        ]

    def receive(
        self, frontend: Simulated, other: str, uses: list[KeyUse], age: float = 0.0
    ) -> None:
        frontend.accounts.receive(LimitUse(other, uses, age), self.now, 0.0)

    def deliver(self, one: Simulated, to: Simulated, age: float = 0.0) -> None:
        """Deliver a full report of `one` without delay."""
        self.receive(to, one.name, [account.report(self.now) for account in one.accounts], age)

    def enter(self, frontend: Simulated) -> bool:
        try:
            entry = frontend.accounts.authenticate(SECRET).enter(self.now)
        except ApiError:
            return False
        frontend.entries.append(entry)
        frontend.admitted.append(self.now)
        return True

    def unreported(self, frontend: Simulated) -> int:
        """Recent requests of other frontends whose report may not have arrived yet."""
        since = self.now - LATEST_S
        others = (other for other in self.frontends if other is not frontend)
        return sum(time > since for other in others for time in other.admitted[-500:])


@pytest.mark.parametrize("seed", range(12))
def test_a_rate_is_exceeded_at_most_by_unreported_use(seed: int) -> None:
    rng = Random(seed)
    most = rng.choice([30, 120, 600])
    world = World(seed, rng.randint(2, 5), key(requests_per_minute=most))
    truth, load = LeakyBucket(0.0), rng.choice([0.02, 0.2, 0.9])
    refused = 0
    for _ in range(20_000):
        world.step()
        if world.rng.random() < load * (world.now % 7 < 5):
            frontend = world.rng.choice(world.frontends)
            level = truth.level(most, world.now)
            if world.enter(frontend):
                leaked = most / 60 * LATEST_S * len(world.frontends)
                assert level <= most - 1 + world.unreported(frontend) + leaked
                truth.add(1)
            else:
                refused += 1
                assert level > most - 2 - most / 60 * LATEST_S * len(world.frontends)
    assert refused or load == 0.02


@pytest.mark.parametrize("seed", range(8))
def test_concurrency_is_exceeded_at_most_by_unreported_use(seed: int) -> None:
    world = World(seed, 4, key(concurrency=10))
    for _ in range(10_000):
        world.step()
        frontend = world.rng.choice(world.frontends)
        if frontend.entries and world.rng.random() < 0.5:
            frontend.entries.pop(world.rng.randrange(len(frontend.entries))).leave()
        elif world.enter(frontend):
            running = sum(len(each.entries) for each in world.frontends)
            assert running <= 10 + world.unreported(frontend)


def test_sequences_of_a_silent_frontend_are_not_counted() -> None:
    world = World(1, 2, key(concurrency=1))
    one, other = world.frontends
    assert world.enter(one)
    world.deliver(one, other)
    assert not world.enter(other)
    world.now = PEER_TIMEOUT_S
    assert world.enter(other)


def test_a_new_frontend_adopts_the_level_of_the_others() -> None:
    world = World(1, 2, key(requests_per_minute=3))
    old, new = world.frontends
    assert [world.enter(old) for _ in range(4)] == [True, True, True, False]
    world.deliver(old, new, age=100.0)
    assert not world.enter(new)


def test_use_that_an_older_frontend_had_from_this_one_counts_once() -> None:
    world = World(1, 2, key(requests_per_minute=6))
    old, new = world.frontends
    assert all(world.enter(new) for _ in range(3))
    world.deliver(new, old)
    assert world.enter(new)  # not reported yet
    world.deliver(old, new, age=100.0)
    assert [world.enter(new) for _ in range(3)] == [True, True, False]


def test_the_next_report_makes_up_for_a_lost_one() -> None:
    world = World(1, 2, key(requests_per_minute=4))
    one, other = world.frontends
    assert world.enter(one)
    world.deliver(one, other)
    assert [world.enter(one), world.enter(one)] == [True, True]  # no report between them
    world.deliver(one, other)
    assert [world.enter(other), world.enter(other)] == [True, False]


# --- programs of this machine and pages of others ---
