"""An assistant message at the end: continued where its API means that."""

from typing import Any

import pytest
from unit.frontend.apis.prompts import conversation, prepared, prompt_of, request_of

from kvmesh.frontend.dialects.output import OutputGrammar
from kvmesh.frontend.dialects.parsing.parser import GrammarParser
from kvmesh.frontend.dialects.templates.chat_template import continued_text
from kvmesh.frontend.errors import InvalidRequest

QUESTION = {"role": "user", "content": "Why?"}
NEW_TURN = "<|im_end|>\n<|im_start|>assistant\n"
TOOL_USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
THINKING = {"type": "thinking", "thinking": "Hm", "signature": ""}


def ending(api: str, content: Any, **fields: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": content}
    return conversation(api, QUESTION, answer) | fields


@pytest.mark.parametrize("text", ["The answer is", "```json\n", "Two blanks  ", "{"])
@pytest.mark.parametrize("parts", [True, False])
def test_messages_continues_the_text_as_it_is(text: str, parts: bool) -> None:
    content = [{"type": "text", "text": text}] if parts else text
    assert prompt_of("messages", ending("messages", content)).endswith(f"assistant\n{text}")


def test_messages_continues_behind_thinking_and_calls() -> None:
    body = ending("messages", [THINKING, TOOL_USE, {"type": "text", "text": "So"}])
    text = prompt_of("messages", body)
    assert text.endswith("So")
    assert '"name": "f"' in text


@pytest.mark.parametrize(
    "content", [[], "", [TOOL_USE], [THINKING], [{"type": "text", "text": ""}]]
)
def test_what_has_no_text_at_its_end_is_followed_by_a_new_turn(content: Any) -> None:
    text = prompt_of("messages", ending("messages", content))
    assert text.endswith(NEW_TURN)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_other_apis_begin_a_new_turn(api: str) -> None:
    text = prompt_of(api, ending(api, "The answer is"))
    assert text.endswith(f"The answer is{NEW_TURN}")


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"chat_template_kwargs": {"continue_final_message": True}},
    ],
)
def test_chat_continues_on_request(fields: dict[str, Any]) -> None:
    assert prompt_of("chat", ending("chat", "So far", **fields)).endswith("assistant\nSo far")


@pytest.mark.parametrize("mark", ["prefix", "partial"])
def test_chat_continues_a_message_that_is_marked_as_a_prefix(mark: str) -> None:
    body = ending("chat", "So far")
    body["messages"][-1][mark] = True
    assert prompt_of("chat", body).endswith("assistant\nSo far")


def test_a_prompt_may_end_without_a_new_turn() -> None:
    text = prompt_of("chat", ending("chat", "So far", add_generation_prompt=False))
    assert text.endswith("So far<|im_end|>\n")


@pytest.mark.parametrize(
    "body",
    [
        ending("chat", "x", continue_final_message=True, add_generation_prompt=True),
        conversation("chat", QUESTION) | {"continue_final_message": True},
        ending("chat", "x", continue_final_message=True, response_format={"type": "json_object"}),
    ],
)
def test_what_cannot_be_continued_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="continue"):
        prompt_of("chat", body)


def test_edits_of_the_history_leave_the_continued_text() -> None:
    calls = [{"type": "tool_use", "id": f"t{n}", "name": "f", "input": {}} for n in range(3)]
    results = [
        {"type": "tool_result", "tool_use_id": f"t{n}", "content": "x" * 99} for n in range(3)
    ]
    turns = [
        {"role": role, "content": [block]}
        for pair in zip(calls, results, strict=True)
        for role, block in zip(("assistant", "user"), pair, strict=True)
    ]
    edit = {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 1}}
    edit |= {"trigger": {"type": "input_tokens", "value": 50}}
    answer = {"role": "assistant", "content": "So far"}
    body = conversation("messages", QUESTION, *turns, answer)
    request = request_of("messages", body | {"context_management": {"edits": [edit]}})
    encoded = prepared(request).encoded
    assert encoded is not None
    assert encoded.text.endswith("assistant\nSo far")
    assert encoded.text.count("[tool result cleared]") == 2
    assert request.context_edits is not None
    assert request.context_edits.applied[0]["cleared_input_tokens"] > 0


def test_a_continued_answer_is_not_kept_as_one() -> None:
    assert not prepared(request_of("messages", ending("messages", "So"))).keeps_answer


@pytest.mark.parametrize(
    ("text", "thinks"),
    [
        ("The answer is", False),
        ("<think>\nHm, so " + "it goes on " * 50, True),
        ("<think>\nHm\n</think>\n\n" + "It is so. " * 50, False),
    ],
)
@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_thinking_goes_on_only_where_the_text_has_left_it_open(
    parser: str, text: str, thinks: bool
) -> None:
    request = request_of("chat", ending("chat", text, continue_final_message=True))
    grammar = OutputGrammar(None, parser)
    assert grammar.begins_thinking(grammar.tail_of(continued_text(request) or "")) == thinks


def test_plain_models_have_no_thinking_to_continue() -> None:
    grammar = OutputGrammar(None, None)
    assert not grammar.begins_thinking(grammar.tail_of("<think>"))
    assert isinstance(grammar.parser([], grammar.tail_of("x")), GrammarParser)
