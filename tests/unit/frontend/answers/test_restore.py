"""The request with the answers as they were generated."""

import json
from collections.abc import Sequence
from typing import Any

from unit.frontend.dialects.recorded import request, result, user

from kvmesh.bus.messages import ShownAnswers
from kvmesh.frontend.answers.answer import Answer, AnswerNames, answer_runs, name_after
from kvmesh.frontend.answers.restore import KnownAnswer, restore
from kvmesh.frontend.conversation import (
    Block,
    CacheControl,
    Generated,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    Tool,
    ToolCall,
)
from kvmesh.frontend.dialects.output import call_id

FILES = "digest"
MARK = CacheControl(300)
GENERATED = Generated("<assistant>", "raw", b"\1\0\0\0")


def read(identifier: str, **arguments: Any) -> ToolCall:
    return ToolCall(identifier, "read", json.dumps(arguments))


class Known:
    """Answers by name, and the requests that return them."""

    def __init__(self) -> None:
        self.answers: dict[str, KnownAnswer] = {}
        self.messages: list[Message] = [user("hi")]

    def generated(self, *blocks: Block, files: str = FILES, forced: bool = False) -> str:
        name = name_after(self.messages, blocks)
        self.answers[name] = KnownAnswer(Answer(files, [*blocks], GENERATED, forced))
        return name

    def returned(self, *blocks: Block) -> None:
        self.messages.append(Message("assistant", [*blocks]))
        calls = [block.id for block in blocks if isinstance(block, ToolCall)]
        self.messages += [result("found", call) for call in calls] or [user("Go on.")]

    def restore(
        self, forced: bool = False, tools: Sequence[Tool] = ()
    ) -> tuple[ShownAnswers | None, GenerateRequest]:
        asked = request(*self.messages)
        asked.tools = [*tools]
        runs = [
            run
            for run in answer_runs(asked.messages, AnswerNames(), "")
            if run.name in self.answers
        ]
        found = [(run, self.answers[run.name]) for run in runs]
        self.news: list[str] = []
        return restore(asked, found, FILES, forced, self.news.append), asked


def test_a_rewritten_answer_is_shown_as_it_was_generated() -> None:
    known, identifier = Known(), call_id()
    blocks: list[Block] = [Thinking("I see."), Text("Let me."), read(identifier, a=1, b=2)]
    known.generated(*blocks)
    known.returned(Text("Let me."), read(identifier, b=2, a=1.0))
    restored, asked = known.restore()
    assert restored == ShownAnswers(answers=1, thinking=1, calls=1)
    assert known.news == ["rewritten"]
    assert asked.messages[1] == Message("assistant", blocks, GENERATED)
    assert asked.messages[2:] == known.messages[2:]
    known.restore()
    assert known.news == []


def test_the_form_is_news_whenever_it_changes() -> None:
    known, identifier = Known(), call_id()
    known.generated(Thinking("I see."), read(identifier, a=1))
    news: list[str] = []
    for blocks in (
        [Thinking("I see."), read(identifier, a=1)],
        [read(identifier, a=1)],
        [ToolCall(identifier, "read", '{"a":1}')],
        [read(identifier, a=1.0)],
        [read(identifier, a=2)],
    ):
        known.messages = [user("hi")]
        known.returned(*blocks)
        known.restore()
        news += known.news
    assert news == ["unchanged", "without_thinking", "without_thinking", "rewritten", "edited"]


def test_an_edited_answer_is_shown_as_sent() -> None:
    known, identifier = Known(), call_id()
    known.generated(read(identifier, a=1))
    known.returned(read(identifier, a=2))
    restored, asked = known.restore()
    assert restored == ShownAnswers(edited=1)
    assert asked.messages == known.messages


def test_answers_of_other_models_and_of_nobody_are_shown_as_sent() -> None:
    known, identifier = Known(), call_id()
    known.generated(read(identifier, a=1), files="other")
    known.returned(read(identifier, a=1))
    known.returned(read(call_id(), a=1))
    known.returned(read("toolu_1", a=1))
    restored, asked = known.restore()
    assert restored is None
    assert asked.messages == known.messages


def test_calls_that_tool_choice_forced_are_shown_to_requests_that_force_calls() -> None:
    known, identifier = Known(), call_id()
    known.generated(Thinking("I see."), read(identifier, a=1), forced=True)
    known.returned(read(identifier, a=1))
    blocks: list[Block] = [Thinking("I see."), read(identifier, a=1)]
    assert known.restore(forced=True)[1].messages[1] == Message("assistant", blocks, GENERATED)
    assert known.restore()[1].messages[1] == Message("assistant", blocks)


def test_answers_to_other_requests_are_shown_as_generated_where_calls_are_forced() -> None:
    known, identifier = Known(), call_id()
    known.generated(Thinking("I see."), read(identifier, a=1))
    known.returned(read(identifier, a=1))
    assert known.restore(forced=True)[1].messages[1].generated == GENERATED


def test_a_form_is_compared_anew_under_another_schema() -> None:
    known, identifier = Known(), call_id()
    known.generated(read(identifier, a="1"))
    known.returned(read(identifier, a=1))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [Tool("read", "", schema)]
    for offered in ([], tools, [], tools):
        restored, _ = known.restore(tools=offered)
        assert restored is not None
        assert restored.answers == bool(offered)


def test_a_request_compares_a_bounded_number_of_values() -> None:
    known = Known()
    for _ in range(10):
        identifier = call_id()
        known.generated(read(identifier, a=[0] * 15_000))
        known.returned(read(identifier, a=[0.0] * 15_000))
    first, _ = known.restore()
    again, _ = known.restore()
    assert first is not None
    assert again is not None
    assert 0 < first.answers < 10
    assert again.answers == 10


def test_equal_texts_are_told_apart_by_their_place() -> None:
    known = Known()
    for thought in ("one", "two"):
        known.generated(Thinking(thought), Text("ok"))
        known.returned(Text("ok"))
    thoughts = [m.blocks[0] for m in known.restore()[1].messages if m.role == "assistant"]
    assert thoughts == [Thinking("one"), Thinking("two")]


def test_an_answer_in_several_messages_becomes_one() -> None:
    known, one, two = Known(), call_id(), call_id()
    blocks: list[Block] = [Text("Let me."), read(one, a=1), read(two, a=2)]
    known.generated(*blocks)
    known.messages += [Message("assistant", [block]) for block in blocks]
    known.messages += [result("found", two), result("found", one)]
    assert known.restore()[1].messages[1:] == [
        Message("assistant", blocks, GENERATED),
        *known.messages[-2:],
    ]


def test_marks_of_the_client_are_kept() -> None:
    known, one, two = Known(), call_id(), call_id()
    known.generated(Thinking("I see."), Text("Let me."), read(one, a=1), read(two, a=2))
    marked = ToolCall(one, "read", '{"a":1}', cache=MARK)
    known.returned(Text("Let me.", MARK), marked, read(two, a=2))
    assert known.restore()[1].messages[1].blocks == [
        Thinking("I see."),
        Text("Let me.", MARK),
        ToolCall(one, "read", '{"a": 1}', cache=MARK),
        read(two, a=2),
    ]


def test_blocks_of_the_store_are_not_changed_by_marks() -> None:
    known, identifier = Known(), call_id()
    name = known.generated(Text("Let me."), read(identifier, a=1))
    known.returned(Text("Let me.", MARK), read(identifier, a=1))
    known.restore()
    assert known.answers[name].answer.blocks == [Text("Let me."), read(identifier, a=1)]
