"""SessionBlocks against a model that compares every block of every session."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.retention.session_blocks import (
    MAX_BRANCHES,
    MAX_COMPARED,
    MAX_KNOWN,
    PromptTail,
    SessionBlocks,
    TailChanges,
    common_prefix,
)

NAMES = "abcd"
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
NOTHING: TailChanges[int] = TailChanges([], [], [])
MAIN, CLEARED, TITLE = 7 << 32 | 1, 7 << 32 | 2, 8 << 32 | 1  # CLEARED is of MAIN's agent


def chain(tokens: list[int]) -> list[int]:
    """Hashes over whole prefixes, like sequence hashes."""
    return [hash(tuple(tokens[: end + 1])) for end in range(len(tokens))]


def tails(found: list[PromptTail[int]]) -> set[int]:
    return {block for tail in found for block in tail.prompt[tail.start :]}


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), st.lists(PROMPTS, max_size=3), min_size=1),
    st.sets(st.sampled_from(NAMES), min_size=1),
)
def test_release_frees_exactly_what_no_live_session_uses(
    prompts: dict[str, list[list[int]]], closed: set[str]
) -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    newest: dict[str, list[int]] = {}
    for name, turns in prompts.items():
        grown: list[int] = []
        for turn in turns:
            grown = [*grown, *turn]
            assert book.record(name, chain(grown), 1.0) == NOTHING
        if turns:
            newest[name] = chain(grown)
    live = {block for name, blocks in newest.items() if name not in closed for block in blocks}
    mine = {block for name, blocks in newest.items() if name in closed for block in blocks}
    assert tails(book.release(sorted(closed))) == mine - live
    assert book.release(sorted(closed)) == []


@given(PROMPTS, PROMPTS)
def test_common_prefix_ends_at_the_first_difference(one: list[int], other: list[int]) -> None:
    first, second = chain(one), chain(other)
    expected = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    assert common_prefix(first, second) == expected


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_what_sessions_have_begun_with_outlives_them_all(order: list[str]) -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("a", chain([1, 2, 3]), 1.0)
    book.record("b", chain([1, 2, 9]), 1.0)
    book.record("b", chain([1, 2, 9, 10]), 2.0)
    book.record("a", chain([1, 5]), 3.0)  # compacted: it shares one block with its own earlier one
    starts = {session: book.release([session])[0].start for session in order}
    assert starts == {"a": 1, "b": 2}
    book.record("c", chain([7, 8]), 4.0)
    assert book.release(["c"]) == [PromptTail(chain([7, 8]), 0)]
    book.record("d", chain([7, 9]), 5.0)  # begins as a session that has ended did
    assert book.release(["d"]) == [PromptTail(chain([7, 9]), 1)]


def test_two_sessions_share_a_prefix() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("a", chain([1, 2, 3, 4]), 1.0)
    book.record("b", chain([1, 2, 9]), 1.0)
    assert book.release(["a"]) == [PromptTail(chain([1, 2, 3, 4]), 2)]
    assert book.release(["a", "unknown"]) == []
    assert book.release(["b"]) == [PromptTail(chain([1, 2, 9]), 2)]  # the next may begin so


def test_a_doubt_is_confirmed_by_the_next_prompt_on_the_new_line() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    old = chain([1, 2, 3, 4])
    book.record("a", old, 1.0, MAIN)
    book.record("other", chain([1, 2, 3]), 1.0)
    assert book.record("a", chain([1, 7]), 2.0, MAIN) == TailChanges([PromptTail(old, 3)], [], [])
    assert book.record("a", chain([1, 7]), 3.0, MAIN) == NOTHING  # sent again
    assert book.record("a", chain([1, 7, 8]), 4.0, MAIN) == TailChanges(
        [], [], [PromptTail(old, 3)]
    )
    assert tails(book.release(["a"])) == set(chain([1, 7, 8])[1:])


def test_prompts_of_no_certain_conversation_confirm_nothing() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    main, side = chain([1, 2, 3, 4]), chain([1, 7])
    book.record("a", main, 1.0)
    assert book.record("a", side, 2.0).doubted == [PromptTail(main, 1)]
    for turn in range(3):
        side = [*side, turn]
        assert not book.record("a", side, 3.0 + turn).dropped
    assert book.record("a", [*main, 5], 9.0).restored == [PromptTail(main, 1)]


def test_what_is_doubted_is_still_its_session_s() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("a", chain([1, 2, 3, 4]), 1.0)
    book.record("a", chain([1, 7]), 2.0)
    book.record("b", chain([1, 2, 9]), 3.0)
    assert tails(book.release(["b"])) == {chain([1, 2, 9])[2]}
    assert tails(book.release(["a"])) == {*chain([1, 2, 3, 4])[2:], chain([1, 7])[1]}


def test_a_side_request_says_nothing_about_the_conversation() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("s", chain([1, 2, 3, 4]), 1.0, MAIN)
    assert book.record("s", chain([1, 9]), 2.0, TITLE) == NOTHING
    assert book.record("s", chain([1, 9, 9]), 3.0, TITLE) == NOTHING
    assert book.record("s", chain([1, 2, 3, 4, 5]), 4.0, MAIN) == NOTHING
    assert book.record("s", chain([1, 5]), 5.0) == NOTHING, "of an unknown conversation"
    assert tails(book.release(["s"])) == {
        *chain([1, 2, 3, 4, 5]),
        *chain([1, 9, 9]),
        *chain([1, 5]),
    }


def test_a_later_conversation_of_an_agent_doubts_an_earlier_one_but_confirms_nothing() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    main, later = [1, 2, 3, 4], [1, 2, 8]
    doubt = PromptTail(chain(main), 2)
    book.record("s", chain(main), 1.0, MAIN)
    assert book.record("s", chain(later), 2.0, CLEARED) == TailChanges([doubt], [], [])
    for number in range(5):
        later.append(number)
        assert book.record("s", chain(later), 3.0, CLEARED) == NOTHING
    main.append(5)
    assert book.record("s", chain(main), 4.0, MAIN) == TailChanges([], [doubt], [])
    assert book.record("s", chain([*later, 5]), 5.0, CLEARED) == NOTHING
    assert book.record("s", chain([1, 6]), 6.0, 7 << 32 | 3) == NOTHING
    edited = book.record("s", chain([1, 2, 3, 9]), 7.0, MAIN)
    assert edited.doubted == [PromptTail(chain(main), 3)]


def test_many_side_requests_do_not_push_out_the_conversation() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    main = chain([1, 2, 3, 4])
    book.record("before", main[:3], 1.0)
    book.record("s", main, 2.0, MAIN)
    for number in range(3 * MAX_BRANCHES):
        assert not book.record("s", chain([1, 10 + number, 5]), 3.0, 9 << 32 | number).dropped
    book.release(["before"])
    assert PromptTail(main, 3) in book.release(["s"])


def test_a_repeated_side_request_of_the_conversation_s_own_key_confirms_nothing() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    main = chain([1, 2, 3, 4])
    book.record("s", main, 1.0, MAIN)
    assert tails(book.record("s", chain([1, 9, 5, 5]), 2.0, MAIN).doubted) == set(main[1:])
    for last in ([6, 6], [7, 7, 7], [8]):
        assert book.record("s", chain([1, 9, *last]), 3.0, MAIN).dropped == []
    assert tails(book.record("s", [*main, 5], 4.0, MAIN).restored) >= set(main[1:])


@pytest.mark.parametrize("tentative", [False, True])
def test_what_was_predicted_settles_nothing(tentative: bool) -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    old, new = chain([1, 2, 3, 4]), chain([1, 7, 8, 9])
    book.record("s", old, 1.0, MAIN)
    assert bool(book.record("s", new[:2], 2.0, MAIN, tentative).doubted) != tentative
    if not tentative:
        assert book.record("s", new[:3], 3.0, MAIN, True) == NOTHING
        assert tails(book.record("s", new, 4.0, MAIN).dropped) == set(old[1:])


def test_more_of_a_request_s_prompt_is_no_later_one() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    old, new = chain([1, 2, 3, 4]), chain([1, 7, 8, 9])
    book.record("s", old[:2], 1.0, MAIN, request="old")
    book.record("s", old[:3], 2.0, MAIN, request="old")
    assert tails(book.record("s", new[:2], 3.0, MAIN, request="new").doubted) == {old[1], old[2]}
    assert book.record("s", new[:3], 4.0, MAIN, request="new") == NOTHING
    assert book.record("s", old, 5.0, MAIN, request="old") == NOTHING
    book.record("s", new, 6.0, MAIN, request="third")
    assert tails(book.record("s", [*new, 5], 7.0, MAIN, request="fourth").dropped) == set(old[1:])


def test_generated_blocks_belong_to_the_session() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    prompt = chain([1, 2])
    book.record("a", prompt, 1.0)
    prompt.append(hash("generated"))
    assert tails(book.release(["a"])) == set(prompt)


def test_a_prefix_of_the_last_prompt_supersedes_nothing() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("a", chain([1, 2, 3]), 1.0)
    assert book.record("a", chain([1, 2]), 2.0) == NOTHING
    assert tails(book.release(["a"])) == set(chain([1, 2, 3]))


def test_prompts_without_a_common_prefix_coexist() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("a", chain([1, 2]), 1.0)
    assert book.record("a", chain([5, 6]), 2.0) == NOTHING
    assert tails(book.release(["a"])) == {*chain([1, 2]), *chain([5, 6])}


def test_a_session_that_returns_to_a_prompt_branches() -> None:
    """For example one prompt_cache_key for all conversations of an application."""
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("key", chain([1, 2, 3]), 1.0)
    first, other = chain([1, 2, 3]), chain([1, 5])
    assert book.record("key", other, 2.0).doubted == [PromptTail(first, 1)]
    assert book.record("key", chain([1, 2, 3, 4]), 3.0).restored == [PromptTail(first, 1)]
    assert book.record("key", chain([1, 5, 6]), 4.0) == NOTHING
    assert book.record("key", chain([1, 9]), 5.0) == NOTHING
    assert book.record("key", chain([1, 9, 9]), 6.0) == NOTHING
    left = {*chain([1, 2, 3, 4]), *chain([1, 5, 6]), *chain([1, 9, 9])}
    assert tails(book.release(["key"])) == left


def test_idle_sessions_are_forgotten() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=10.0, max_blocks=1000)
    book.record("idle", chain([1, 2]), 1.0)
    book.record("busy", chain([1, 3]), 12.0)
    assert "idle" not in book
    assert tails(book.release(["busy"])) == set(chain([1, 3]))


def test_memory_is_bounded() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=1e9, max_blocks=100)
    for i in range(1000):
        book.record(f"s{i}", chain([1, i, i, i, i]), 1.0)
        book.record("growing", chain([7] * (i % 20)), 1.0)
    assert len(book) <= 22
    for i in range(2000):
        book.record("many", chain([1, i % 3, i]), 1.0, MAIN + i, request=f"r-{i}")
        book.record("many", chain([1, i % 3, i % 2, i]), 1.0, i % 5 << 32 | i % 7)
    entry = book._sessions["many"]
    assert len(entry.prompts) <= MAX_BRANCHES
    assert len(entry.branching) <= MAX_KNOWN >= len(entry.parallel)
    assert len(entry.requests) <= MAX_KNOWN
    assert book.shared_blocks(chain([1, 999, 999])) == 3
    assert book.shared_blocks(chain([1, 999, 999]), except_session="s999") == 1


class Counting(list[int]):
    """A prompt that counts how often its blocks are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def test_a_new_session_is_compared_with_few_of_many_that_begin_like_it() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=100_000)
    for number in range(3 * MAX_COMPARED):
        book.record(f"s{number}", [0, 2 * number + 1], 1.0)
    prompt = Counting([0, 2])
    book.record("new", prompt, 1.0)
    assert 0 < prompt.reads < 2 * MAX_COMPARED
    assert book.release(["new"]) == [PromptTail(prompt, 1)]


def test_the_prompts_of_released_sessions_are_bounded() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=10)
    for root in (1, 2, 3):
        book.record("a", chain([root, 5, 6, 7]), 1.0)
        book.release(["a"])
    for root, start in ((1, 0), (3, 1)):
        book.record("b", chain([root, 8]), 2.0)
        assert book.release(["b"])[0].start == start


@dataclass
class ModelPrompt:
    session: str
    conversation: int
    tokens: list[int]
    sent: int
    doubt: tuple[int, bool] | None = None

    @property
    def family(self) -> tuple[str, int]:
        return self.session, self.conversation


@dataclass
class Model:
    """The rules on lists of tokens, with every prompt compared to every other one."""

    prompts: list[ModelPrompt] = field(default_factory=list)
    settled: set[object] = field(default_factory=set)

    def record(
        self, session: str, tokens: list[int], conversation: int, tentative: bool
    ) -> tuple[set[int], set[int], set[int]]:
        """The blocks that are doubted, restored and dropped."""
        new = ModelPrompt(session, conversation, tokens, 0 if tentative else len(tokens))
        mine = [p for p in self.prompts if p.family == new.family]
        doubted: list[tuple[ModelPrompt, int]] = []
        restored: set[int] = set()
        dropped: list[tuple[ModelPrompt, int]] = []
        if not tentative:
            for old in mine:
                if old.doubt is not None and old.doubt[1]:
                    self.settled.add((session, conversation >> 32))
                elif old.doubt is not None and begins(tokens, old.tokens[: old.doubt[0] + 1]):
                    self.settled.add(new.family)
            for old in self.prompts:
                if old.doubt is not None and old.session == session:
                    agent = session, old.conversation >> 32
                    if (agent if old.doubt[1] else old.family) in self.settled:
                        restored.update(chain(old.tokens)[old.doubt[0] :])
                        old.doubt = None
            bases = [p for p in mine if p.sent < len(tokens) and begins(tokens, p.tokens[: p.sent])]
            for old in mine:
                shared = common_prefix(chain(old.tokens), chain(tokens))
                if old.doubt is not None and any(0 < shared < base.sent for base in bases):
                    dropped.append((old, shared))
                    self.prompts.remove(old)
        for old in mine:
            if old in self.prompts and old.doubt is None and begins(tokens, old.tokens):
                new.sent = max(new.sent, old.sent)
                self.prompts.remove(old)
        for old in [] if tentative else self.prompts:
            shared = common_prefix(chain(old.tokens), chain(tokens))
            if (
                old.session == session
                and old.doubt is None
                and 0 < shared < min(len(old.tokens), len(tokens))
                and self.may_follow(new, old)
            ):
                old.doubt = shared, old.family != new.family
                doubted.append((old, shared))
        self.prompts.append(new)
        live = [p for p in self.prompts if p.doubt is None]
        return (
            self.unused(doubted, live),
            restored,
            self.unused(dropped, self.prompts),
        )

    def may_follow(self, new: ModelPrompt, old: ModelPrompt) -> bool:
        if new.family == old.family:
            return new.family not in self.settled
        agents = {p.conversation >> 32 for p in (new, old)}
        return 0 not in agents and len(agents) == 1 and (new.session, *agents) not in self.settled

    @staticmethod
    def unused(left: list[tuple[ModelPrompt, int]], users: list[ModelPrompt]) -> set[int]:
        used = {block for user in users for block in chain(user.tokens)}
        return {block for old, start in left for block in chain(old.tokens)[start:]} - used


def begins(tokens: list[int], start: list[int]) -> bool:
    return tokens[: len(start)] == start


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            PROMPTS,
            st.sampled_from([0, MAIN, CLEARED, TITLE]),
            st.sampled_from([False, False, False, True]),
        ),
        max_size=MAX_BRANCHES,
    )
)
def test_conversations_are_doubted_and_dropped_as_the_rules_say(
    turns: list[tuple[str, list[int], int, bool]],
) -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    model = Model()
    begun: dict[str, set[int]] = {}  # by session
    for session, tokens, conversation, tentative in turns:
        blocks = chain(tokens)
        changes = book.record(session, blocks, 1.0, conversation, tentative)
        doubted, restored, dropped = model.record(session, tokens, conversation, tentative)
        begun.setdefault(session, set()).update(blocks)
        others = set().union(*(found for name, found in begun.items() if name != session))
        assert doubted - others <= tails(changes.doubted) <= doubted
        assert tails(changes.restored) == restored
        assert dropped - others <= tails(changes.dropped) <= dropped
        assert not tails(changes.dropped) & set(blocks)


@given(st.lists(PROMPTS, min_size=1, max_size=6))
def test_no_first_difference_drops_anything(prompts: list[list[int]]) -> None:
    """Whatever prompts of one length a session sends: none of them continues another."""
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    for prompt in prompts:
        same = [*prompt, *([0] * 6)][:6]
        assert not book.record("s", chain(same), 1.0, MAIN).dropped
