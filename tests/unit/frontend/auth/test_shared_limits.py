"""Limits that several frontends hold together, under random interleavings of what they say."""

import hashlib
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest

from kvmesh.bus.messages import KeyUse, LimitUse
from kvmesh.frontend.auth.accounts import PEER_TIMEOUT_S, AccountEntry, Accounts, Key, LeakyBucket
from kvmesh.frontend.auth.shared_limits import HEARTBEAT_S, INTERVAL_S
from kvmesh.frontend.errors import ApiError

DELAY_S = 0.03  # that a message takes at most
LATEST_S = INTERVAL_S + DELAY_S  # from a frontend's use until all others know of it
SECRET = "s"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


def key(requests_per_minute: int | None = None, concurrency: int | None = None) -> Key:
    limits = {"requests_per_minute": requests_per_minute, "concurrency": concurrency}
    return msgspec.convert({"name": "k", "sha256": DIGEST, **limits}, Key)


@dataclass
class Said:
    due: float
    frontend: str
    uses: list[KeyUse]


@dataclass
class Simulated:
    """One frontend as `SharedUse` runs it; `entries` are what it lets run."""

    name: str
    accounts: Accounts
    told: float = 0.0
    told_all: float = 0.0
    entries: list[AccountEntry] = field(default_factory=list)
    let_in: list[float] = field(default_factory=list)

    def tell(self, now: float) -> list[KeyUse]:
        if now - self.told_all >= HEARTBEAT_S:
            accounts = [a for a in self.accounts if a in self.accounts.changed or not a.idle(now)]
            self.told_all = now
        elif now - self.told >= INTERVAL_S:
            accounts = list(self.accounts.changed)
        else:
            return []
        self.told = now
        self.accounts.changed.clear()
        return [account.use(now) for account in accounts]


class World:
    """Time passes in steps of a millisecond or so; messages take random times, in order."""

    def __init__(self, seed: int, count: int, limits: Key) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.frontends = [self._made(f"f{n}", limits) for n in range(count)]
        self.under_way: list[tuple[Simulated, Said]] = []

    def _made(self, name: str, limits: Key) -> Simulated:
        accounts = Accounts()
        accounts.replace([limits], 0.0)
        return Simulated(name, accounts)

    def step(self) -> None:
        self.now += self.rng.random() * 0.002
        for frontend in self.frontends:
            if uses := frontend.tell(self.now):
                for other in self.frontends:
                    if other is not frontend:
                        due = self.now + self.rng.random() * (DELAY_S - 0.003)
                        due = max([due, *self._dues(frontend, other)])
                        self.under_way.append((other, Said(due, frontend.name, uses)))
        arrived = [entry for entry in self.under_way if entry[1].due <= self.now]
        self.under_way = [entry for entry in self.under_way if entry[1].due > self.now]
        for frontend, said in sorted(arrived, key=lambda entry: entry[1].due):
            self.hear(frontend, said.frontend, said.uses)

    def _dues(self, one: Simulated, to: Simulated) -> list[float]:
        return [
            said.due for other, said in self.under_way if (other, said.frontend) == (to, one.name)
        ]

    def hear(self, frontend: Simulated, other: str, uses: list[KeyUse], age: float = 0.0) -> None:
        frontend.accounts.receive(LimitUse(other, uses, age), self.now, 0.0)

    def say(self, one: Simulated, to: Simulated, age: float = 0.0) -> None:
        """All that `one` has to say, at once."""
        self.hear(to, one.name, [account.use(self.now) for account in one.accounts], age)

    def ask(self, frontend: Simulated) -> bool:
        try:
            entry = frontend.accounts.authenticate(SECRET).enter(self.now)
        except ApiError:
            return False
        frontend.entries.append(entry)
        frontend.let_in.append(self.now)
        return True

    def untold(self, frontend: Simulated) -> int:
        """What others let in of late, of which a frontend need not know."""
        since = self.now - LATEST_S
        others = (other for other in self.frontends if other is not frontend)
        return sum(time > since for other in others for time in other.let_in[-500:])


@pytest.mark.parametrize("seed", range(12))
def test_a_rate_is_exceeded_by_no_more_than_what_others_have_not_told(seed: int) -> None:
    rng = Random(seed)
    most = rng.choice([30, 120, 600])
    world = World(seed, rng.randint(2, 5), key(requests_per_minute=most))
    truth, load = LeakyBucket(0.0), rng.choice([0.02, 0.2, 0.9])
    refused = 0
    for _ in range(20_000):
        world.step()
        if world.rng.random() < load * (world.now % 7 < 5):
            frontend = world.rng.choice(world.frontends)
            owed = truth.level(most, world.now)
            if world.ask(frontend):
                came_in = most / 60 * LATEST_S * len(world.frontends)
                assert owed <= most - 1 + world.untold(frontend) + came_in
                truth.add(1)
            else:
                refused += 1
                assert owed > most - 2 - most / 60 * LATEST_S * len(world.frontends)
    assert refused or load == 0.02


@pytest.mark.parametrize("seed", range(8))
def test_what_runs_at_once_is_exceeded_by_no_more_than_that(seed: int) -> None:
    world = World(seed, 4, key(concurrency=10))
    for _ in range(10_000):
        world.step()
        frontend = world.rng.choice(world.frontends)
        if frontend.entries and world.rng.random() < 0.5:
            frontend.entries.pop(world.rng.randrange(len(frontend.entries))).leave()
        elif world.ask(frontend):
            running = sum(len(each.entries) for each in world.frontends)
            assert running <= 10 + world.untold(frontend)


def test_a_frontend_that_is_silent_runs_nothing() -> None:
    world = World(1, 2, key(concurrency=1))
    one, other = world.frontends
    assert world.ask(one)
    world.say(one, other)
    assert not world.ask(other)
    world.now = PEER_TIMEOUT_S
    assert world.ask(other)


def test_a_newcomer_owes_what_all_owe() -> None:
    world = World(1, 2, key(requests_per_minute=3))
    old, new = world.frontends
    assert [world.ask(old) for _ in range(4)] == [True, True, True, False]
    world.say(old, new, age=100.0)
    assert not world.ask(new)


def test_a_lost_message_is_made_up_for() -> None:
    world = World(1, 2, key(requests_per_minute=4))
    one, other = world.frontends
    assert world.ask(one)
    world.say(one, other)
    assert [world.ask(one), world.ask(one)] == [True, True]  # of the first nobody hears
    world.say(one, other)
    assert [world.ask(other), world.ask(other)] == [True, False]


def test_a_rotated_key_keeps_its_account_and_its_old_secret_for_a_while() -> None:
    accounts = Accounts()
    accounts.replace([key(concurrency=1)], 0.0)
    accounts.authenticate(SECRET).enter(0.0)
    new = hashlib.sha256(b"new").hexdigest()
    after = Key(name="k", sha256=new, concurrency=1, old_sha256=DIGEST, old_until=100.0)
    accounts.replace([after], 0.0)
    assert accounts.authenticate("new", 99.0) is accounts.authenticate(SECRET, 99.0)
    with pytest.raises(ApiError):
        accounts.authenticate("new", 99.0).enter(0.0)
    with pytest.raises(ApiError):
        accounts.authenticate(SECRET, 100.0)


def test_a_key_ends_when_it_says() -> None:
    accounts = Accounts()
    accounts.replace([Key(name="k", sha256=DIGEST, expires=10.0)], 0.0)
    assert accounts.authenticate(SECRET, 9.0).key.name == "k"
    with pytest.raises(ApiError):
        accounts.authenticate(SECRET, 10.0)


# --- programs of this machine and pages of others ---
