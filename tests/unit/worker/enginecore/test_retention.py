"""Claims, pins and sessions on runs: random requests against a model with one entry per block."""

from array import array
from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from kvmesh.bus.messages import (
    Cleared,
    KvEvent,
    Pin,
    Removed,
    Retain,
    Sampling,
    Stored,
    Work,
)
from kvmesh.hashing import sequence_hashes
from kvmesh.retention.claims import DOUBTFUL
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.radix_tree import BlockRun
from kvmesh.worker.enginecore.retention_options import RetentionOptions
from kvmesh.worker.enginecore.retention_request import (
    PREFETCH_PRIORITY,
    inherited_retention,
    parse_retention,
)

CAPACITY = 16
SALT = 9
LOCALS = st.lists(st.integers(0, 2), min_size=1, max_size=7)
RETAINS = st.lists(
    st.builds(
        Retain,
        start=st.integers(0, 5),
        end=st.one_of(st.none(), st.integers(1, 7)),
        priority=st.sampled_from([0, 20, 35, 60, 100]),
        ttl_s=st.sampled_from([None, 3.0, 10.0]),
        kind=st.sampled_from(["conversation", "thinking"]),
        explicit=st.booleans(),
    ),
    max_size=3,
)
NAMES = st.sampled_from(["a", "b", "c"])


def packed(values: list[int]) -> "array[int]":
    return array("Q", values)


def hashes(local: list[int]) -> "array[int]":
    return packed(list(array("Q", sequence_hashes(packed(local).tobytes()))))


class RetentionMachine(RuleBasedStateMachine):
    """Requests of one-token blocks start, end and are forgotten while time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(CAPACITY, RetentionOptions(budget=0.5, session_idle_s=1e9))
        self.running: list[tuple[array[int], Work]] = []
        self.held: dict[int, int | None] = {}
        self.newest: dict[str, set[int]] = {}
        self.conversations: dict[tuple[str, int], set[int]] = {}
        self.ever: dict[str, set[int]] = {}
        self.left: set[int] = set()

    @property
    def keeping_runs(self) -> list[BlockRun]:
        return [run for run in self.manager.retention._tree if run.retention is not None]

    @rule(
        local=LOCALS,
        session=st.one_of(st.none(), NAMES),
        retention=RETAINS,
        tenant=st.sampled_from(["", "t"]),
        conversation=st.sampled_from([0, 0, 4 << 32 | 1, 4 << 32 | 2, 5 << 32]),
        priority=st.sampled_from([0, 0, 0, PREFETCH_PRIORITY]),
    )
    def begin(
        self,
        local: list[int],
        session: str | None,
        retention: list[Retain],
        tenant: str,
        conversation: int,
        priority: int,
    ) -> None:
        if tenant:
            local = [9, *local]  # what differs in tenant shares nothing
        blocks = hashes(local)
        way = self.manager.match_prefix(blocks)
        held = way.matched
        if len(local) - held + way.inactive > self.manager.available:
            return
        self.manager.lock_prefix(blocks)
        assert self.manager.allocate(len(local) - held)
        parent = blocks[held - 1] if held else None
        self.manager.promote(parent, SALT, blocks[held:], packed(local[held:]), tenant)
        work = Work(
            request="r",
            frontend="f",
            tokens=array("I", local).tobytes(),
            sampling=Sampling(max_tokens=1),
            session=session,
            tenant=tenant,
            retention=retention,
            conversation=conversation,
            priority=priority,
        )
        self.apply_events()
        before = set(self.held)
        asked = parse_retention(work, 1, RetentionOptions().defaults)
        told = self.manager.retention.start_request(blocks, blocks, asked, self.manager.now)
        explicit = sum(retain.explicit for retain in retention)
        assert len(told or []) == explicit
        self.running.append((blocks, work))
        self.apply_events()
        assert not (before - set(self.held)) & set().union(*self.conversations.values())
        if session is not None:
            self.newest[session] = set(blocks)
            self.conversations[session, conversation] = set(blocks)
            self.ever.setdefault(session, set()).update(blocks)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), priority=st.sampled_from([0, 0, 1, 100]))
    def end(self, data: st.DataObject, priority: int) -> None:
        blocks, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.manager.unlock(blocks, priority)

    @rule(session=NAMES)
    def release(self, session: str) -> None:
        before = set(self.held)
        gone = self.newest.pop(session, set())
        self.conversations = {k: v for k, v in self.conversations.items() if k[0] != session}
        ended = self.ever.pop(session, set())
        count = self.manager.retention.release([session])
        self.apply_events()
        dropped = before - set(self.held)
        assert len(dropped) == count
        live = set().union(*self.newest.values()) if self.newest else set()
        used = {block for blocks, _ in self.running for block in blocks}
        assert not dropped & (live | used)
        pinned = {
            b
            for run in self.keeping_runs
            if run.retention and run.retention.pins
            for b in run.hashes
        }
        # A session may hold several conversations: all that it has used may be live. What several
        # sessions have begun with stays, released ones included.
        needed = used.union(pinned, self.left, *self.ever.values())
        self.left |= ended
        assert all(
            block in needed or self.has_needed_child(block, needed)
            for block in gone & set(self.held)
        )

    def has_needed_child(self, block: int, needed: set[int]) -> bool:
        return any(
            child in needed or self.has_needed_child(child, needed)
            for child, parent in self.held.items()
            if parent == block
        )

    @rule(name=NAMES, local=LOCALS, ttl=st.sampled_from([2.0, 20.0]))
    def pin(self, name: str, local: list[int], ttl: float) -> None:
        command = Pin(id=name, sequence_hashes=hashes(local).tobytes(), ttl_s=ttl)
        blocks = self.manager.retention.pin(command, self.manager.now)
        assert blocks <= self.manager.match_prefix(hashes(local)).matched

    @rule(name=NAMES)
    def unpin(self, name: str) -> None:
        self.manager.retention.unpin(name, self.manager.now)

    @rule(count=st.integers(1, CAPACITY))
    def allocate_available(self, count: int) -> None:
        """All available blocks can be allocated, whatever their retention."""
        available = self.manager.available
        assert self.manager.allocate(count) == (count <= available)
        if count <= available:
            self.manager.free_private(count)

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.manager.now += seconds

    @rule(salt=st.sampled_from([None, SALT + 1]))
    def clear(self, salt: int | None) -> None:
        idle = self.manager.cached
        assert self.manager.clear(salt) == (0 if salt == SALT + 1 else idle)

    def apply_events(self) -> None:
        for event in self.manager.take_events():
            self.apply(event)

    def apply(self, event: KvEvent) -> None:
        assert not isinstance(event, Cleared)
        if isinstance(event, Removed):
            for block in array("Q", event.engine):
                assert block not in self.held.values(), "children go before their parents"
                del self.held[block]
        elif isinstance(event, Stored):
            parent = event.parent
            for block in array("Q", event.engine):
                assert block not in self.held
                self.held[block] = parent
                parent = block

    @invariant()
    def events_match_contents(self) -> None:
        self.apply_events()
        assert set(self.held) == self.manager.contents
        used = {block for blocks, _ in self.running for block in blocks}
        assert used <= set(self.held)
        assert (self.manager.active, self.manager.cached) == (
            len(used),
            len(self.held) - len(used),
        )

    @invariant()
    def budgets_hold_and_are_accounted_for(self) -> None:
        charged: Counter[str] = Counter()
        for run in self.keeping_runs:
            assert run.retention is not None
            assert run.retention
            assert run.retention.charged == run.retention.needs_budget
            charged[run.retention.tenant] += len(run) * run.retention.charged
        assert +charged == Counter(self.manager.retention.budget.charged)
        assert all(size <= CAPACITY // 2 for size in charged.values())

    @invariant()
    def idle_runs_are_evictable(self) -> None:
        idle = [run for run in self.manager.retention._tree if not run.refs]
        assert len(self.manager.retention.evictable) == len(idle)
        assert all(run in self.manager.retention.evictable for run in idle)
        for run in idle:
            if run.doubtful and run.retention is None:
                assert self.manager.retention.evictable.eviction_rank(run) == DOUBTFUL

    @invariant()
    def what_is_used_is_not_doubtful(self) -> None:
        runs = list(self.manager.retention._tree)
        assert not any(run.doubtful for run in runs if run.refs)


TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_claims_of_another_tier_are_inherited() -> None:
    manager = BlockManager(8, RetentionOptions())
    blocks = hashes([1, 2, 3, 4])
    assert manager.allocate(4)
    manager.promote(None, SALT, blocks, packed([1, 2, 3, 4]))
    before = inherited_retention([Retain(16, 48, 80, 10.0)], 16, "t")
    manager.retention.claim_inherited(blocks, before, manager.now)
    assert manager.retention.budget.charged == {"t": 2}
    manager.unlock(blocks)
    manager.take_events()
    assert manager.allocate(8 - 3)
    assert [
        list(array("Q", e.engine)) for e in manager.take_events() if isinstance(e, Removed)
    ] == [[blocks[3]]]
    manager.now = 10.0
    assert manager.allocate(3)
    assert manager.retention.budget.charged == {}


def put(manager: BlockManager, local: list[int], tenant: str, priority: int = 0) -> "array[int]":
    """Run a prompt to its end; returns its blocks."""
    blocks = hashes(local)
    held = manager.lock_prefix(blocks)
    assert manager.allocate(len(local) - held)
    parent = blocks[held - 1] if held else None
    manager.promote(parent, SALT, blocks[held:], packed(local[held:]), tenant)
    manager.unlock(blocks, priority)
    return blocks


def test_urgent_requests_of_a_tenant_stay_within_its_budget() -> None:
    manager = BlockManager(CAPACITY, RetentionOptions(budget=0.5))
    for prompt in range(1, 7):
        put(manager, [100 * prompt, 1, 2, 3], f"evil/{prompt}", priority=65)
    assert manager.retention.budget.charged == {"evil": CAPACITY // 2}
    mine = put(manager, [1, 2, 3, 4], "victim")
    put(manager, [900, 1, 2, 3], "evil", priority=65)
    assert manager.match_prefix(mine).matched == 4
    manager.now += RetentionOptions().session_idle_s
    manager.retention.evictable.expire(manager.now)
    assert manager.retention.budget.charged == {}


def run_request(manager: BlockManager, local: list[int], work: Work, request: str) -> None:
    """Run a prompt with its claims to its end."""
    blocks, claims = hashes(local), parse_retention(work, 1, {})
    held = manager.lock_prefix(blocks)
    assert manager.allocate(len(local) - held, request)
    parent = blocks[held - 1] if held else None
    manager.promote(parent, SALT, blocks[held:], packed(local[held:]), work.tenant)
    manager.retention.start_request(blocks, blocks, claims, manager.now)
    manager.unlock(blocks)


def removals(manager: BlockManager) -> list[tuple[int, str | None, str | None]]:
    """Number, reason and request of each removal since the last call."""
    return [
        (len(event.engine) // 8, event.reason, event.request)
        for event in manager.take_events()
        if isinstance(event, Removed)
    ]


def work_of(tokens: int, retention: list[Retain], session: str | None = None) -> Work:
    packed_tokens, sampling = array("I", range(tokens)).tobytes(), Sampling(max_tokens=1)
    return Work(
        request="r",
        frontend="f",
        tokens=packed_tokens,
        sampling=sampling,
        session=session,
        tenant="t",
        retention=retention,
    )


def test_a_removal_tells_its_reason_and_for_whose_blocks_it_was() -> None:
    manager = BlockManager(8, RetentionOptions(budget=0.25, session_idle_s=1e9))
    short = Retain(0, 2, 60, 3.0, "conversation", True)
    run_request(manager, [1, 2], work_of(2, [short]), "r-1")
    long = Retain(0, 4, 60, 100.0, "conversation", True)
    run_request(manager, [11, 12, 13, 14], work_of(4, [long]), "r-2")
    manager.now = 5.0
    run_request(manager, [21, 22, 23, 24, 25, 26], work_of(6, []), "r-3")
    assert sorted(removals(manager)) == [(2, "clipped", "r-3"), (2, "expired", "r-3")]
    run_request(manager, [31, 32, 33, 34], work_of(4, []), "r-4")
    assert ("evicted", "r-4") in {(reason, request) for _, reason, request in removals(manager)}
    manager.clear()
    assert {(reason, request) for _, reason, request in removals(manager)} == {("cleared", None)}


def known(work: Work) -> Work:
    """Work of a conversation that is known for certain."""
    return structs.replace(work, conversation=4 << 32)


def test_sessions_that_end_or_change_their_prompt_name_the_reason() -> None:
    manager = BlockManager(16, RetentionOptions(session_idle_s=1e9))
    run_request(manager, [1, 2, 3, 4], known(work_of(4, [], "a")), "r-1")
    run_request(manager, [1, 2, 9, 9], known(work_of(4, [], "a")), "r-2")
    assert removals(manager) == []
    run_request(manager, [1, 2, 9, 9, 5], known(work_of(5, [], "a")), "r-3")
    assert removals(manager) == [(2, "superseded", None)]
    manager.retention.release(["a"])
    assert removals(manager) == [(5, "released", None)]


def test_doubtful_blocks_go_first_and_name_the_reason() -> None:
    manager = BlockManager(16, RetentionOptions(session_idle_s=1e9))
    thinking = Retain(0, None, -1, kind="thinking")
    run_request(manager, [1, 2, 3, 4], work_of(4, [], "a"), "r-1")
    run_request(manager, [21, 22], work_of(2, [thinking]), "r-thinking")
    run_request(manager, [1, 2, 9, 9], work_of(4, [], "a"), "r-2")
    assert matched(manager, [1, 2, 3, 4]) == [4]
    put(manager, list(range(100, 109)), "")
    assert removals(manager) == [(1, "superseded", None)]
    assert manager.retention.state(0, 0.0).evicted == {"recency": 0, "claim": 1}
    put(manager, [200, 201], "")
    assert removals(manager) == [(1, "superseded", None), (1, "evicted", None)]


def test_a_use_ends_the_doubt_as_the_conversation_s_return_does() -> None:
    for session, back in (("b", [1, 2, 3]), (None, [1, 2, 3]), ("a", [1, 2, 3, 7])):
        manager = BlockManager(10, RetentionOptions(session_idle_s=1e9))
        run_request(manager, [1, 2, 3, 4, 5], work_of(5, [], "a"), "r-1")
        run_request(manager, [1, 9], work_of(2, [], "a"), "r-2")
        run_request(manager, back, work_of(4, [], session), "r-3")
        manager.take_events()
        assert manager.allocate(manager.capacity - len(manager.contents) + 2)
        assert matched(manager, [1, 2, 3, 4, 5]) == [3]
        reason = "evicted" if session == "a" else "superseded"
        assert removals(manager) == [(2, reason, None)]


def test_explicitly_retained_and_pinned_blocks_are_not_moved_first() -> None:
    manager = BlockManager(12, RetentionOptions(session_idle_s=1e9))
    kept = [Retain(0, 3, 90, explicit=True)]
    run_request(manager, [1, 2, 3, 4], work_of(4, kept, "a"), "r-1")
    run_request(manager, [1, 9], work_of(2, [], "a"), "r-2")
    put(manager, [31, 32], "")
    put(manager, list(range(100, 108)), "")
    assert matched(manager, [1, 2, 3, 4], [1, 9]) == [3, 1]
    pin = Pin(id="p", sequence_hashes=hashes([1, 2, 3]).tobytes(), ttl_s=60.0)
    manager.retention.pin(pin, manager.now)
    run_request(manager, [1, 9], work_of(2, [], "a"), "r-3")
    run_request(manager, [1, 9, 5], work_of(3, [], "a"), "r-4")
    assert matched(manager, [1, 2, 3]) == [3], "the doubt is confirmed, but a pin holds them"


def test_a_confirmed_tail_leaves_what_others_continue() -> None:
    manager = BlockManager(16, RetentionOptions(session_idle_s=1e9))
    run_request(manager, [1, 2, 3, 4], known(work_of(4, [], "a")), "r-1")
    run_request(manager, [1, 2, 3, 8], work_of(4, []), "r-nobody")
    run_request(manager, [1, 9], known(work_of(2, [], "a")), "r-2")
    run_request(manager, [1, 9, 5], known(work_of(3, [], "a")), "r-3")
    assert matched(manager, [1, 2, 3, 4], [1, 2, 3, 8]) == [3, 4]


def test_requests_that_are_no_turn_say_nothing_about_the_conversation() -> None:
    main, other = [1, 2, 3, 4], work_of(3, [], "a")
    for work in (
        structs.replace(other, ephemeral=True),
        structs.replace(other, generated=1),
        structs.replace(other, conversation=5 << 32),
        structs.replace(other, priority=PREFETCH_PRIORITY),
    ):
        manager = BlockManager(16, RetentionOptions(session_idle_s=1e9))
        run_request(manager, main, structs.replace(other, conversation=4 << 32), "r-1")
        run_request(manager, [1, 9, 9], structs.replace(work, conversation=4 << 32), "r-2")
        run_request(manager, [1, 9, 9, 9], work, "r-3")
        assert (matched(manager, main), removals(manager)) == ([4], [])


def test_a_prediction_casts_doubt_until_the_next_prompt_tells() -> None:
    for actual, kept in (([1, 2, 3, 4, 5], 4), ([1, 8, 8, 8, 8], 3)):
        manager = BlockManager(14, RetentionOptions(session_idle_s=1e9))
        run_session(manager, [1, 2, 3, 4], "a", "r-1")
        put(manager, [31, 32], "")
        run_session(manager, [1, 8], "a", "ahead", ahead=True)
        put(manager, list(range(100, 108)), "")
        assert matched(manager, [1, 2, 3, 4], [31, 32]) == [3, 2]
        manager.clear()
        run_session(manager, [1, 2, 3, 4], "a", "r-1")
        run_session(manager, [1, 8], "a", "ahead", ahead=True)
        run_session(manager, actual, "a", "r-2")
        put(manager, list(range(100, 100 + manager.capacity - len(manager.contents) + 1)), "")
        assert matched(manager, [1, 2, 3, 4]) == [kept]


def run_session(
    manager: BlockManager, local: list[int], session: str, request: str, ahead: bool = False
) -> None:
    """Run a prompt of a session to its end."""
    blocks, claims = hashes(local), parse_retention(work_of(1, [], session), 1, {})
    assert claims is not None
    claims = replace(claims, ahead=ahead)
    held = manager.lock_prefix(blocks)
    assert manager.allocate(len(local) - held, request)
    parent = blocks[held - 1] if held else None
    manager.promote(parent, SALT, blocks[held:], packed(local[held:]), "t")
    manager.retention.start_request(blocks, blocks, claims, manager.now)
    manager.unlock(blocks)


def matched(manager: BlockManager, *prompts: list[int]) -> list[int]:
    return [manager.match_prefix(hashes(local)).matched for local in prompts]


def test_recency_decides_about_what_nobody_claims() -> None:
    manager = BlockManager(8, RetentionOptions())
    for name, local in (("a", [1, 2, 3, 4]), ("b", [11, 12, 13, 14])):
        run_session(manager, local, name, f"r-{name}")
    manager.take_events()
    assert manager.allocate(4, "new")
    assert matched(manager, [1, 2, 3, 4], [11, 12, 13, 14]) == [0, 4]
    assert removals(manager) == [(4, "evicted", "new")]
    assert manager.retention.state(0, manager.now).evicted == {"recency": 4, "claim": 0}
