"""Results of tools in the order of their calls, whatever the order of their arrival."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.conversation import (
    Block,
    CacheControl,
    Message,
    Text,
    ToolCall,
    ToolNotice,
    ToolResult,
)
from kvmesh.frontend.preprocess.tool_results import in_call_order

ASK = Message("user", [Text("go")])


def calls(*names: str) -> Message:
    return Message("assistant", [ToolCall(name, "f", "{}") for name in names])


def result(name: str, ttl_s: float | None = None, text: str = "") -> ToolResult:
    mark = None if ttl_s is None else CacheControl(ttl_s)
    return ToolResult(name, [Text(text or f"of {name}")], cache=mark)


def separate(*blocks: Block) -> list[Message]:
    return [Message("tool" if isinstance(b, ToolResult) else "user", [b]) for b in blocks]


def shown(messages: list[Message]) -> list[Block]:
    return [block for message in in_call_order(messages) for block in message.blocks]


@pytest.mark.parametrize("order", list(permutations("ABC")))
@pytest.mark.parametrize("together", [True, False])
def test_the_order_of_arrival_does_not_matter(order: tuple[str, ...], together: bool) -> None:
    results = [result(name) for name in order]
    run = [Message("user", list[Block](results))] if together else separate(*results)
    assert shown([ASK, calls("A", "B", "C"), *run])[4:] == [result(name) for name in "ABC"]


def test_calls_may_be_spread_over_messages_and_results_over_others() -> None:
    messages = [calls("A"), calls("B"), calls("C"), *separate(result("C"))]
    messages += [Message("user", [result("A"), result("B"), Text("next")])]
    assert shown(messages)[3:] == [result("A"), result("B"), result("C"), Text("next")]


def test_ids_may_repeat_in_later_answers() -> None:
    turn = [calls("A", "B"), *separate(result("B"), result("A"))]
    assert shown([*turn, *turn])[6:] == [result("A"), result("B")]


def test_what_else_follows_an_answer_comes_behind_its_results_in_its_own_order() -> None:
    late, orphan, double = result("old"), result("none"), result("A", text="again")
    run = separate(late, result("B"), Text("note"), result("A"), orphan, double, Text("go on"))
    expected = [result("A"), result("B"), late, Text("note"), orphan, double, Text("go on")]
    assert shown([calls("old"), ASK, calls("A", "B"), *run])[4:] == expected


def test_equal_ids_of_one_answer_are_paired_in_order() -> None:
    first, second = result("A", text="1"), result("A", text="2")
    run = separate(first, result("B"), second)
    assert shown([calls("A", "A", "B"), *run])[3:] == [first, second, result("B")]


def test_a_conversation_in_order_stays_the_same_object() -> None:
    messages = [ASK, calls("A", "B"), *separate(result("A"), result("B"), Text("x")), ASK]
    assert in_call_order(messages) is messages


def test_a_mark_covers_all_that_it_covered_before() -> None:
    run = [Message("user", [result("B"), result("A", 60.0), Text("next")])]
    marks = {b.call_id: b.cache for b in shown([calls("A", "B"), *run]) if type(b) is ToolResult}
    assert marks == {"A": None, "B": CacheControl(60.0)}
    run = [Message("user", [result("B", 60.0), result("A", 30.0)])]
    marks = {b.call_id: b.cache for b in shown([calls("A", "B"), *run]) if type(b) is ToolResult}
    assert marks == {"A": None, "B": CacheControl(60.0)}
    marked = Text("note", CacheControl(9.0))
    found = shown([calls("A"), *separate(ToolNotice("t"), marked, result("A"))])
    assert found[1:] == [result("A"), ToolNotice("t"), marked]


_block = st.one_of(
    st.sampled_from("ABCX").flatmap(
        lambda name: st.sampled_from([None, 1.0, 2.0]).map(lambda ttl: result(name, ttl))
    ),
    st.sampled_from([Text("t"), Text("u", CacheControl(3.0)), ToolNotice("n")]),
)


@given(st.lists(st.lists(_block, min_size=1), max_size=5))
def test_nothing_is_lost_and_a_second_time_changes_nothing(run: list[list[Block]]) -> None:
    messages = [calls("A", "B", "C"), *(Message("user", blocks) for blocks in run), ASK]
    once = in_call_order(messages)
    assert in_call_order(once) is once

    def bare(found: list[Message]) -> list[str]:
        blocks = (block for message in found for block in message.blocks)
        return sorted(f"{getattr(b, 'call_id', b)}".partition(", cache")[0] for b in blocks)

    assert bare(once) == bare(messages)

    def longest(found: list[Message]) -> float:
        blocks = [block for message in found for block in message.blocks]
        return max([mark.ttl_s for b in blocks if (mark := getattr(b, "cache", None))], default=0)

    assert longest(once) == longest(messages)
