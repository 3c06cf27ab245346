"""A prompt is computed from its front while its last blocks are loaded; both meet."""

from array import array
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.worker.enginecore.backward_load import BackwardLoad, LoadBatch
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.scheduler import Scheduler, SchedulerLimits
from kvmesh.worker.enginecore.sequence import Request, Sequence, SequenceState, hash_prompt
from kvmesh.worker.enginecore.simulated_tiers import SimulatedTiers, TierOptions

SIZE = 16
TOKEN_S = 1e-4  # a block takes 1.6 ms to compute


class NoText:
    def slice(self, start: int, stop: int) -> list[int]:
        return [0] * (stop - start)


class Engine:
    """A scheduler with a kvbm, and a clock."""

    def __init__(self, blocks: int = 1000, step: int = 512, token_s: float = TOKEN_S) -> None:
        manager = BlockManager(blocks)
        limits = SchedulerLimits(block_size=SIZE, max_batched_tokens=step)
        tiers = SimulatedTiers(TierOptions(), SIZE, 1.0, manager, lambda: True)
        self.blocks = manager
        self.scheduler = Scheduler(limits, manager, tiers)
        self.backward = self.scheduler.backward
        self.backward.token_s = token_s
        self.now = 0.0

    def submit(self, name: str, tokens: int) -> Sequence:
        text = array("I", [sum(name.encode()) + n for n in range(tokens)]).tobytes()
        local, sequence, tail = hash_prompt(text, SIZE, 0)
        request = Request(
            id=name,
            length=tokens,
            local_hashes=local,
            sequence_hashes=sequence,
            tail=tail,
            source=NoText(),
            target=4,
        )
        return self.scheduler.submit(request)

    def step(self) -> dict[str, int]:
        """Tokens by request of the next step, which ends at once."""
        self.scheduler.take_arrived(self.now)
        chunks = self.scheduler.schedule_next_batch(self.now)
        for chunk in chunks:
            self.scheduler.record_computed(chunk.sequence, chunk.tokens)
        return {chunk.sequence.request.id: chunk.tokens for chunk in chunks}

    def begin(self, name: str, tokens: int, blocks: int) -> tuple[Sequence, BackwardLoad]:
        """Start a request of which a node holds the first `blocks` blocks."""
        sequence = self.submit(name, tokens)
        self.step()
        assert sequence.state is SequenceState.LOADING
        load = self.scheduler.begin_backward(sequence, self.now)
        load.extend(bytes([1] * blocks))
        load.pending = False
        return sequence, load

    def load_next(self, valid: int | None = None) -> LoadBatch:
        """Load the next batch, of which the last `valid` blocks can be used."""
        chosen = self.backward.next_batch(self.now)
        assert chosen is not None
        sequence, batch = chosen
        self.backward.finish(sequence, batch, len(batch) if valid is None else valid)
        return batch

    def all_batches(self) -> Iterator[LoadBatch]:
        while (chosen := self.backward.next_batch(self.now)) is not None:
            self.backward.finish(*chosen, len(chosen[1]))
            yield chosen[1]


def test_the_last_blocks_come_first_and_the_front_continues_behind_them() -> None:
    engine = Engine()
    engine.backward.block_s = 0.0016  # as fast as computing
    sequence, _ = engine.begin("a", 100 * SIZE + 5, 100)
    assert engine.step() == {"a": 512}
    batches = list(engine.all_batches())
    assert [batch.end for batch in batches] == [100, *(batch.first for batch in batches[:-1])]
    assert batches[-1].first >= 512 // SIZE
    while sequence.computed < sequence.length:
        if not engine.step():
            batches += engine.all_batches()
    loaded = sum(map(len, batches))
    assert sequence.cached == [0, loaded * SIZE]
    assert sequence.arriving is None
    assert sequence.full_blocks == 100
    assert sequence.private_blocks == 1
    assert engine.blocks.active == 101


def test_both_meet_where_their_speeds_have_it() -> None:
    engine = Engine(step=10_000)
    engine.backward.block_s = 0.0048  # three times as long as computing
    engine.begin("a", 400 * SIZE + 5, 400)
    (tokens,) = engine.step().values()
    assert abs(tokens - 300 * SIZE) <= SIZE


def test_a_fast_link_is_left_alone_and_other_prompts_go_first() -> None:
    engine = Engine()
    engine.backward.block_s = 0.0004
    sequence, _ = engine.begin("a", 100 * SIZE + 5, 100)
    assert engine.step() == {}
    assert 0.0 < engine.backward.recheck_at - engine.now < 0.16
    list(engine.all_batches())
    assert engine.step() == {"a": 5}
    assert sequence.cached == [0, 1600]


def test_over_a_link_that_saves_hardly_anything_a_batch_is_tried_from_time_to_time() -> None:
    engine = Engine()
    engine.backward.block_s = 9 * SIZE * TOKEN_S
    engine.begin("a", 400 * SIZE + 5, 400)
    assert len(engine.load_next()) == 1
    assert engine.backward.next_batch(engine.now) is None
    while engine.step() and engine.now < 0.6:
        engine.now += 0.05
        assert engine.backward.next_batch(engine.now) is None
    engine.now += 20.0
    engine.begin("b", 400 * SIZE + 5, 400)
    engine.load_next()
    engine.backward.block_s = 7 * SIZE * TOKEN_S  # as measured by then
    assert engine.backward.next_batch(engine.now) is not None


def test_computing_takes_over_from_a_link_that_freezes() -> None:
    engine = Engine(step=10_000)
    engine.backward.block_s = 0.0004
    sequence, _ = engine.begin("a", 100 * SIZE + 5, 100)
    chosen = engine.backward.next_batch(engine.now)
    assert chosen is not None
    waited = 0
    while sequence.computed < sequence.length:
        if not engine.step():
            assert engine.backward.recheck_at > engine.now
            engine.now = engine.backward.recheck_at
            waited += 1
    assert engine.now < 4 * 100 * SIZE * TOKEN_S
    assert waited
    assert chosen[1].abandoned
    assert engine.blocks.active == 101 + len(chosen[1])
    engine.backward.finish(*chosen, len(chosen[1]))
    assert engine.blocks.active == 101


def test_a_late_batch_is_abandoned_once_computing_it_would_have_been_faster() -> None:
    engine = Engine(step=10_000)
    engine.backward.block_s = 0.0016
    sequence, load = engine.begin("a", 200 * SIZE + 5, 200)
    chosen = engine.backward.next_batch(engine.now)
    assert chosen is not None
    load.stop()
    assert engine.step() == {"a": chosen[1].first * SIZE}
    assert engine.step() == {}
    engine.now += len(chosen[1]) * SIZE * TOKEN_S
    assert engine.step() == {"a": len(chosen[1]) * SIZE + 5}
    assert sequence.cached == [0]


def test_blocks_before_a_wrong_one_are_computed() -> None:
    engine = Engine()
    sequence, _ = engine.begin("a", 40 * SIZE + 5, 40)
    batch = engine.load_next(valid=1)
    assert engine.backward.next_batch(engine.now) is None
    while sequence.computed < sequence.length:
        assert engine.step()
    assert len(batch) > 1
    assert sequence.cached == [0, SIZE]
    assert engine.blocks.active == 41


def test_the_front_stops_where_the_node_still_looks_for_blocks() -> None:
    engine = Engine()
    engine.backward.block_s = 1.0
    sequence, load = engine.begin("a", 20 * SIZE + 5, 10)
    load.pending = True
    assert engine.step() == {"a": 10 * SIZE}
    assert engine.step() == {}
    load.extend(bytes([3] * 6))
    load.stop()
    assert engine.step() == {"a": 10 * SIZE + 5}
    assert sequence.cached == [0]


def test_nothing_is_computed_until_the_speed_of_computing_is_known() -> None:
    engine = Engine(token_s=0.0)
    sequence, _ = engine.begin("a", 40 * SIZE + 5, 40)
    assert engine.step() == {}
    assert sum(map(len, engine.all_batches())) == 40
    assert engine.step() == {"a": 5}
    assert sequence.cached == [0, 640]


def test_a_removed_sequence_frees_its_blocks_once_none_is_written_to() -> None:
    engine = Engine()
    engine.begin("a", 40 * SIZE + 5, 40)
    engine.load_next()
    chosen = engine.backward.next_batch(engine.now)
    assert chosen is not None
    engine.scheduler.abort("a")
    assert chosen[1].abandoned
    assert engine.blocks.active == len(chosen[1])
    engine.backward.finish(*chosen, len(chosen[1]))
    assert engine.blocks.active == 0
    assert engine.backward.next_batch(engine.now) is None


def test_one_step_is_not_given_for_a_lookup_that_saves_less() -> None:
    engine = Engine()
    decoding = engine.submit("d", 20)
    engine.step()
    engine.scheduler.lock_held(decoding)
    decoding.ready_at = 0.0
    engine.step()
    engine.scheduler.start_decoding(decoding)
    engine.backward.step_s = 320 * TOKEN_S
    assert engine.submit("long", 321).state is SequenceState.WAITING
    short = engine.submit("short", 319)
    assert engine.step() == {"short": 319}
    assert short.state is SequenceState.PREFILLING
    assert [s.request.id for s in engine.scheduler.loading] == ["long"]


@given(
    st.integers(1, 60),
    st.integers(0, 20),
    st.lists(st.sampled_from(["step", "start", "end", "bad", "wait"]), max_size=60),
    st.sampled_from([0.0, 0.0002, 0.0016, 0.02]),
)
def test_any_order_of_steps_and_arrivals_ends_with_each_token_once(
    blocks: int, more: int, events: list[str], block_s: float
) -> None:
    engine = Engine(step=64)
    engine.backward.block_s = block_s
    sequence, _ = engine.begin("a", (blocks + more) * SIZE + 3, blocks)
    moving: tuple[Sequence, LoadBatch] | None = None
    computed = 0
    for event in [*events, *["end", "step", "wait"] * 200]:
        if event == "step":
            computed += sum(engine.step().values())
        elif event == "wait":
            engine.now += 0.01
        elif event == "start" and moving is None:
            moving = engine.backward.next_batch(engine.now)
        elif moving is not None and event in ("end", "bad"):
            engine.backward.finish(*moving, len(moving[1]) if event == "end" else 0)
            moving = None
        if sequence.computed == sequence.length:
            break
    if moving is not None:
        engine.backward.finish(*moving, 0)
    engine.scheduler.take_arrived(engine.now)
    assert sequence.computed == sequence.length
    assert sequence.cached is not None
    assert computed + sum(sequence.cached) == sequence.length
    assert sequence.arriving is None
    assert engine.blocks.active == blocks + more + 1
