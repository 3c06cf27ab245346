"""Streams in any order of answers and failures."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.weights.stream import Failure, FetchOptions, StreamPlan

FAILURES: tuple[Failure, ...] = ("lost", "timeout", "corrupt", "absent", "busy")
STEPS = 5_000


@dataclass
class Caller:
    """Does what a plan says and checks its bounds; each source has its own outcomes."""

    chunks: int
    options: FetchOptions
    name: str
    now: float = 0.0
    asked: Counter[int] = field(default_factory=Counter)
    open: list[tuple[str, int]] = field(default_factory=list)
    there: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.plan = StreamPlan([1 << 20] * self.chunks, self.options, self.name)

    def send(self) -> None:
        for request in self.plan.requests(self.now):
            assert request.chunk not in self.there
            assert request.deadline > self.now
            self.open.append((request.source, request.chunk))
        copies = Counter(chunk for _, chunk in self.open if chunk not in self.there)
        assert max(copies.values(), default=0) <= 2
        assert sum(count - 1 for count in copies.values()) <= self.options.duplicates
        by_source = Counter(source for source, _ in self.open)
        assert max(by_source.values(), default=0) <= self.options.depth

    def arrive(self, source: str, chunk: int) -> None:
        assert self.plan.arrived(source, chunk, self.now) == (chunk not in self.there)
        self.there.add(chunk)
        assert self.plan._board.missing == self.chunks - len(self.there)

    def fail(self, source: str, chunk: int, reason: Failure) -> None:
        for dropped in self.plan.failed(source, chunk, reason, self.now):
            self.open.remove((source, dropped))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_all_chunks_arrive_while_one_honest_source_remains(data: st.DataObject) -> None:
    draw = data.draw
    chunks = draw(st.integers(1, 30))
    options = FetchOptions(
        sources=draw(st.integers(1, 5)),
        window=draw(st.integers(1, 80)),
        head=draw(st.integers(1, 8)),
        depth=draw(st.integers(1, 6)),
        duplicates=draw(st.integers(0, 4)),
    )
    random = draw(st.randoms(use_true_random=False))
    caller = Caller(chunks, options, draw(st.text()))
    plan, others = caller.plan, draw(st.integers(0, 6))
    plan.join("honest", 0.0, complete=True, local=draw(st.booleans()))
    for i in range(others):
        plan.join(f"s{i}", 0.0, complete=random.random() < 0.5)
    for _ in range(STEPS):
        if plan.done:
            break
        caller.send()
        for source in plan.polls(caller.now):
            bits = bytes(random.choices((0, 1, 2, 3, 7), k=chunks))
            plan.learn(source, bits, caller.now)
        caller.send()
        if not caller.open:
            wake = plan.wake_at(caller.now)
            assert wake is not None
            caller.now = max(wake, caller.now + 1e-3)
            continue
        caller.now += random.random() * 0.1
        source, chunk = caller.open.pop(random.randrange(len(caller.open)))
        if source == "honest" or random.random() < 0.3:
            caller.arrive(source, chunk)
        elif random.random() < 0.1:
            plan.leave(source)
            caller.open = [each for each in caller.open if each[0] != source]
        else:
            caller.fail(source, chunk, random.choice(FAILURES))
        if random.random() < 0.05:
            plan.join(f"s{random.randrange(8)}", caller.now, complete=random.random() < 0.5)
    assert plan.done
    assert caller.there == set(range(chunks))


@given(st.text(), st.integers(1, 300), st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_without_failures_nothing_is_requested_twice(name: str, chunks: int, sources: int) -> None:
    caller = Caller(chunks, FetchOptions(), name)
    for i in range(sources):
        caller.plan.join(f"s{i}", 0.0, complete=True)
    sent = 0
    while not caller.plan.done:
        caller.send()
        for source, chunk in caller.open:
            caller.now += 0.001
            sent += 1
            caller.arrive(source, chunk)
        caller.open.clear()
    assert sent == chunks
