"""The core of the mock: schedule, step times, output and events."""

from array import array
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from statistics import pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.bus.messages import Cleared, KvEvent, Removed
from kvmesh.hashing import block_hashes
from kvmesh.step_times.interface import DecodeLoad
from kvmesh.worker.enginecore.scheduler import SchedulerLimits
from kvmesh.worker.enginecore.sequence import Request, SequenceState, hash_prompt
from kvmesh.worker.engines.mock.core import CoreOptions, MockCore, MockOutput, StepResult
from kvmesh.worker.engines.mock.timing import PolynomialStepModel

SIZE = 4
LIMITS = SchedulerLimits(block_size=SIZE, max_sequences=8, max_batched_tokens=32, watermark=0.0)
SMALL = CoreOptions(blocks=32, limits=LIMITS)


class Counting:
    """The answer whose i-th token is 1000 + i."""

    def slice(self, start: int, stop: int) -> list[int]:
        return list(range(1000 + start, 1000 + stop))


def request(
    name: str, prompt: Iterable[int], target: int = 4, priority: int = 0, generated: int = 0
) -> Request:
    tokens = array("I", prompt)
    local, sequence, tail = hash_prompt(tokens.tobytes(), SIZE, 3)
    return Request(
        id=name,
        length=len(tokens),
        local_hashes=local,
        sequence_hashes=sequence,
        tail=tail,
        source=Counting(),
        target=target,
        generated=generated,
        salt=3,
        priority=priority,
    )


def check_batch(core: MockCore) -> None:
    """Assert that the load's figures of the batch are those of its sequences."""
    load, clock = core.load("w", 0), core.scheduler.decoding.clock
    live = core.scheduler.live.values()
    decoding = [
        s.computed + clock - s.synced_step for s in live if s.state is SequenceState.DECODING
    ]
    waiting = [s.length for s in live if s.state is SequenceState.WAITING]
    started = [
        s.length - s.computed
        for s in live
        if s.state not in (SequenceState.DECODING, SequenceState.WAITING)
    ]
    assert (load.decoding, load.decode_tokens) == (len(decoding), sum(decoding))
    assert (load.waiting, load.waiting_tokens) == (len(waiting), sum(waiting))
    assert load.prefill_tokens == sum(waiting) + sum(started)
    assert load.decode_var == pytest.approx(pvariance(decoding) if decoding else 0.0)
    assert load.waiting_var == pytest.approx(pvariance(waiting) if waiting else 0.0)


class Run:
    """Steps a core to its end and records its output; checks the events at every step."""

    def __init__(self, core: MockCore) -> None:
        self.core = core
        self.now = 0.0
        self.outputs: list[MockOutput] = []
        self.events: list[KvEvent] = []
        self.held = core.blocks.contents

    def step(self, horizon: float = 0.0) -> list[MockOutput]:
        result = self.core.step(self.now, horizon)
        self.now += result.duration
        self.outputs += result.outputs
        self.events += result.events
        for event in result.events:
            if isinstance(event, Cleared):
                self.held.clear()
            elif isinstance(event, Removed):
                self.held -= set(array("Q", event.engine))
            else:
                self.held |= set(array("Q", event.engine))
        assert self.held == self.core.blocks.contents
        assert self.core.blocks.active + self.core.blocks.cached <= self.core.blocks.capacity
        check_batch(self.core)
        return result.outputs

    def finish(self, horizon: float = 0.0) -> "Run":
        steps = 0
        while self.core.busy:
            self.step(horizon)
            steps += 1
            assert steps < 100_000
        return self

    def answer(self, name: str) -> list[int]:
        tokens: list[int] = []
        for output in self.outputs:
            if output.request == name:
                assert output.offset - self._first(name) == len(tokens)
                tokens += output.tokens
        return tokens

    def _first(self, name: str) -> int:
        return next(o.offset for o in self.outputs if o.request == name)


def run(core: MockCore, *requests: Request) -> Run:
    for r in requests:
        core.submit(r)
    return Run(core)


def test_one_request_gets_its_tokens_in_order_and_ends_by_length() -> None:
    done = run(MockCore(SMALL), request("a", range(10), target=7)).finish()
    assert done.answer("a") == [1000, 1001, 1002, 1003, 1004, 1005, 1006]
    assert [o.finish for o in done.outputs] == [None] * 6 + ["length"]
    assert done.outputs[0].cached == [0]
    assert all(o.cached is None for o in done.outputs[1:])
    assert done.core.blocks.active == 0


def test_the_blocks_of_an_answer_are_those_of_the_next_prompt() -> None:
    done = run(MockCore(SMALL), request("a", range(10), target=7)).finish()
    follow_up = [*range(10), *done.answer("a"), 5, 6, 7]
    done.core.submit(request("b", follow_up))
    done.finish()
    assert next(o.cached for o in done.outputs if o.request == "b") == [16]


def test_a_whole_cached_prompt_still_computes_its_last_block() -> None:
    core = MockCore(SMALL)
    run(core, request("a", range(16))).finish()
    again = run(core, request("b", range(16))).finish()
    assert again.outputs[0].cached == [12]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    core = MockCore(replace(SMALL, blocks=64))
    going = run(core, request("a", range(8), target=20))
    going.step()
    core.submit(request("b", range(500, 600), target=2))
    seen = [[o.request for o in going.step()] for _ in range(4)]
    assert seen == [["a"], ["a"], ["a"], ["a", "b"]]


def test_a_step_that_computes_prompt_tokens_counts_as_one() -> None:
    going = run(MockCore(SMALL), request("a", range(2), target=9))
    going.step()
    going.step()
    going.core.submit(request("b", range(100, 170), target=2))
    going.finish()
    counters = going.core.counters
    assert counters.prefill_steps == 1 + 3, "chunks of 31, 31 and 8 tokens"
    assert counters.steps > counters.prefill_steps


def test_higher_priority_goes_first_then_arrival() -> None:
    one = SchedulerLimits(block_size=SIZE, max_sequences=1, max_batched_tokens=32, watermark=0.0)
    core = MockCore(CoreOptions(blocks=32, limits=one))
    ordered = [("a", 0), ("b", 0), ("c", 5), ("d", -1), ("e", 5)]
    done = run(core, *(request(n, [i] * 6, 1, p) for i, (n, p) in enumerate(ordered))).finish()
    assert [o.request for o in done.outputs] == ["c", "e", "a", "b", "d"]


def test_the_last_sequence_is_preempted_and_its_answer_is_complete() -> None:
    core = MockCore(CoreOptions(blocks=10, limits=LIMITS))
    done = run(
        core,
        request("a", range(100, 112), target=16),
        request("b", range(200, 212), target=16),
        request("c", range(300, 304), target=8, priority=1),
    ).finish()
    assert core.scheduler.preemptions > 0
    assert done.answer("a") == done.answer("b") == list(range(1000, 1016))
    assert done.answer("c") == list(range(1000, 1008))
    ends = [o.request for o in done.outputs if o.finish]
    assert ends[0] == "c"
    assert ends.index("a") < ends.index("b")


def test_the_watermark_keeps_blocks_free_when_admitting() -> None:
    limits = SchedulerLimits(block_size=SIZE, max_sequences=8, watermark=0.5)
    core = MockCore(CoreOptions(blocks=10, limits=limits))
    going = run(core, request("a", range(12), 2), request("b", range(50, 66), 2))
    assert [o.request for o in going.step()] == ["a"]
    going.finish()
    assert going.answer("b") == [1000, 1001]


def test_an_aborted_request_gives_its_blocks_back() -> None:
    core = MockCore(SMALL)
    going = run(core, request("a", range(8), 50), request("b", range(8), 50))
    going.step()
    assert core.abort("a")
    assert not core.abort("a")
    assert core.abort("b")
    assert not core.busy
    assert core.blocks.active == 0
    assert core.counters.aborted == 2


def test_a_migrated_request_continues_the_same_answer() -> None:
    whole = run(MockCore(SMALL), request("a", range(10), target=12)).finish()
    prompt = [*range(10), *whole.answer("a")[:5]]
    rest = run(MockCore(SMALL), request("a", prompt, target=12, generated=5)).finish()
    assert rest.outputs[0].offset == 5
    assert rest.answer("a") == whole.answer("a")[5:]
    assert rest.held == whole.held


def test_a_request_that_can_never_fit_is_refused() -> None:
    core = MockCore(SMALL)
    with pytest.raises(ValueError, match="does not fit"):
        core.submit(request("a", range(100), target=29))
    core.submit(request("b", range(100), target=28))
    with pytest.raises(ValueError, match="already live"):
        core.submit(request("b", range(4)))


def test_clear_drops_unused_blocks_only() -> None:
    core = MockCore(SMALL)
    run(core, request("a", range(16), 1)).finish()
    going = run(core, request("b", range(50, 66), 9))
    going.step()
    assert core.blocks.clear() == 4
    assert core.blocks.cached == 0
    assert core.blocks.active == 4


def test_the_default_polynomial_and_the_speedup() -> None:
    model = PolynomialStepModel()
    assert model.prefill(0) == 0
    assert model.prefill(1000) == pytest.approx((0.4209989 + 15.18344 + 16.50142) / 1000)
    assert model.decode(DecodeLoad(0, 0, 100)) == 0
    assert model.decode(DecodeLoad(3, 50, 100)) == pytest.approx((5.74 + 27.005 - 6.435) / 1000)
    slow = run(MockCore(SMALL), request("a", range(20))).finish()
    fast = run(MockCore(replace(SMALL, speedup=10.0)), request("a", range(20))).finish()
    assert slow.now == pytest.approx(10 * fast.now)


CASES = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(6, 40), st.integers(1, 8), st.sampled_from([0.0, 0.2])
)


def random_requests(rng: Random, longest: int) -> list[Request]:
    trunk = [rng.randrange(3) for _ in range(longest)]
    requests = []
    for i in range(rng.randrange(1, 12)):
        shared, own = rng.randrange(1, longest // 2), rng.randrange(0, longest // 4 + 1)
        prompt = [*trunk[:shared], *(rng.randrange(3) for _ in range(own))]
        target = rng.randrange(1, longest - len(prompt) + 1)
        requests.append(request(f"r{i}", prompt, target, rng.randrange(3)))
    return requests


@given(CASES)
@settings(max_examples=80, deadline=None)
def test_random_requests_end_with_complete_answers_and_correct_events(
    case: tuple[int, int, int, float],
) -> None:
    seed, blocks, sequences, watermark = case
    rng = Random(seed)
    limits = SchedulerLimits(
        block_size=SIZE, max_sequences=sequences, max_batched_tokens=24, watermark=watermark
    )
    core = MockCore(CoreOptions(blocks=blocks, limits=limits))
    waiting = random_requests(rng, blocks * SIZE)
    expected = {r.id: r.target for r in waiting}
    going = Run(core)
    aborted = set()
    while core.busy or waiting:
        while waiting and rng.random() < 0.4:
            core.submit(waiting.pop())
        if core.busy and rng.random() < 0.02:
            aborted.add(name := rng.choice(list(core.scheduler.live)))
            core.abort(name)
        going.step()
    for name, target in expected.items():
        if name not in aborted:
            assert going.answer(name) == list(range(1000, 1000 + target))
    assert core.blocks.active == 0


@given(st.integers(0, 2**32 - 1), st.floats(0.001, 1.0))
@settings(max_examples=60, deadline=None)
def test_many_decode_steps_in_one_call_change_nothing(seed: int, horizon: float) -> None:
    requests = random_requests(Random(seed), 120)
    single = run(MockCore(replace(SMALL, blocks=40)), *requests).finish()
    merged = run(MockCore(replace(SMALL, blocks=40)), *requests).finish(horizon)
    assert merged.now == pytest.approx(single.now)
    assert merged.core.counters.steps == single.core.counters.steps
    assert merged.events == single.events
    for r in requests:
        assert merged.answer(r.id) == single.answer(r.id)


@given(st.integers(0, 2**32 - 1), st.floats(0.001, 1.0))
@settings(max_examples=60, deadline=None)
def test_a_core_without_tokens_makes_the_same_steps(seed: int, horizon: float) -> None:
    requests = random_requests(Random(seed), 120)
    options = replace(SMALL, blocks=40)
    loud = run(MockCore(options), *requests).finish(horizon)
    quiet = run(MockCore(replace(options, emit_tokens=False)), *requests).finish(horizon)
    assert quiet.now == loud.now
    assert quiet.events == loud.events
    assert quiet.core.counters == loud.core.counters
    for r in requests:
        own_outputs = [o for o in quiet.outputs if o.request == r.id]
        assert own_outputs[0].tokens == [1000]
        assert own_outputs[0].cached is not None
        assert [o.finish for o in own_outputs[1:] if o.finish] == ["length"] * (r.target > 1)
    ends = [(o.request, o.finish) for o in loud.outputs if o.finish]
    assert sorted(ends) == sorted((o.request, o.finish) for o in quiet.outputs if o.finish)


class PlannedAheadRun(Run):
    """Lets the core plan decode steps ahead; a request that arrives cuts them short."""

    def step_until(self, arrival: float | None, horizon: float) -> None:
        begun = self.now
        planned = self.core.plan(self.now, horizon)
        if isinstance(planned, StepResult):
            self.now += planned.duration
            self.outputs += planned.outputs
            return
        if arrival is not None and arrival < begun + planned.duration:
            planned = planned.until(arrival - begun)
        self.now += planned.duration
        self.outputs += self.core.execute(planned).outputs
        check_batch(self.core)


def serve(going: Run, arrivals: list[tuple[float, Request]], horizon: float | None) -> None:
    """Run until all requests end; a request is admitted at the first step after its arrival."""
    arrivals = sorted(arrivals, key=lambda a: (a[0], a[1].id), reverse=True)
    while going.core.busy or arrivals:
        if not going.core.busy:
            going.now = max(going.now, arrivals[-1][0])
        while arrivals and arrivals[-1][0] <= going.now:
            going.core.submit(arrivals.pop()[1])
        if isinstance(going, PlannedAheadRun) and horizon is not None:
            going.step_until(arrivals[-1][0] if arrivals else None, horizon)
        else:
            going.step()


@given(st.integers(0, 2**32 - 1), st.floats(0.001, 1.0), st.integers(30, 90))
@settings(max_examples=80, deadline=None)
def test_steps_planned_ahead_and_cut_by_arrivals_change_nothing(
    seed: int, horizon: float, blocks: int
) -> None:
    rng = Random(seed)
    requests = [known_answer(r) for r in random_requests(rng, blocks * SIZE)]
    arrivals = [(rng.random() * 2, r) for r in requests]
    options = replace(SMALL, blocks=blocks, emit_tokens=False)
    single, ahead = Run(MockCore(options)), PlannedAheadRun(MockCore(options))
    serve(single, arrivals, None)
    serve(ahead, arrivals, horizon)
    assert ahead.now == pytest.approx(single.now)
    assert ahead.core.counters.steps == single.core.counters.steps
    assert ahead.core.counters.busy_s == pytest.approx(single.core.counters.busy_s)
    assert ahead.core.blocks.contents == single.core.blocks.contents
    assert ahead.core.counters.prefill_steps == single.core.counters.prefill_steps
    ends = [[(o.request, o.cached, o.finish) for o in r.outputs] for r in (ahead, single)]
    assert ends[0] == ends[1]


def known_answer(r: Request) -> Request:
    """The request with the hashes of its answer, as in the simulator."""
    local, sequence, tail = r.local_hashes, r.sequence_hashes, r.tail
    answer = array("I", r.source.slice(0, r.target)).tobytes()
    more_local, more_sequence = block_hashes(
        tail + answer, SIZE, int.from_bytes(sequence[-8:] or r.salt.to_bytes(8, "little"), "little")
    )
    return replace(r, local_hashes=local + more_local, sequence_hashes=sequence + more_sequence)
