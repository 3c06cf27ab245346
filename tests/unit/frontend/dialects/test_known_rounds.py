"""A turn's prompt of which an earlier rendering has written most is the one written anew."""

import random
from typing import Any

import pytest
from unit.frontend.dialects.recorded import TODAY, call, request, template, tool

from kvmesh.frontend.conversation import (
    Block,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    ToolResult,
)
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.templates import sandbox
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate
from kvmesh.frontend.turn_memo import NO_MEMO, TurnMemo

TEMPLATES = ["demo", "chatml", "llama3", "mistral", "gemma", "deepseek", "last_query", "channels"]
TEMPLATES += ["numbered", "parts", "within_turn", "trailing_ids", "no_end"]
TOOLS = [tool("read", path={"type": "string"}), tool("grep", deferred=True)]
WORDS = ["look", "é {{ x }}", "<b> & 'c'", "done.", "long " * 40, "", " x "]


def rendered(of: ChatTemplate, asked: GenerateRequest, memo: TurnMemo) -> str:
    asked.memo = memo
    try:
        return of.render(asked, TODAY)
    except TemplateError as error:
        return f"error: {error}"


def grown(rng: random.Random, messages: list[Message], number: int) -> list[Message]:
    """The messages with one more turn of any form."""
    words = [Text(rng.choice(WORDS)) for _ in range(3)]
    blocks: list[Block] = [*rng.sample([Thinking(rng.choice(WORDS))], rng.randint(0, 1))]
    blocks += words[: rng.randint(0, 1)]
    kind = rng.randint(0, 6)
    if kind == 0:
        return [*messages, Message(rng.choice(["system", "user"]), [*words[:2]])]
    calls = [
        call("read", f"c{number}-{n}", path=rng.choice(WORDS)) for n in range(rng.randint(0, 2))
    ]
    answer = Message("assistant", [*blocks, *calls] or [Text("ok")])
    results: list[Block] = [ToolResult(c.id, [*words[:1]], rng.random() < 0.2) for c in calls]
    if not results:
        return [*messages, answer, Message("user", [words[0]])]
    if kind == 1:
        return [*messages, answer, Message("user", [*results, words[1]])]
    return [*messages, answer, *(Message("tool", [each]) for each in results)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_known_rounds_write_what_they_wrote(name: str) -> None:
    of = template(name)
    for seed in range(5):
        check(of, random.Random(seed))


def check(of: ChatTemplate, rng: random.Random) -> None:
    memo = TurnMemo()
    messages = [Message("system", [Text("s")])] if rng.random() < 0.5 else []
    messages = [*messages, Message("user", [Text("hi")])]
    for number in range(25):
        messages = grown(rng, messages, number)
        if rng.random() < 0.1:
            del messages[rng.randint(1, len(messages)) :]
        if rng.random() < 0.1:
            at = rng.randrange(len(messages))
            messages[at] = Message(messages[at].role, [Text(f"edited {number}")])
        tools = TOOLS if rng.random() < 0.9 else []
        arguments: dict[str, Any] = {"enable_thinking": False} if rng.random() < 0.1 else {}
        asked = request(*messages, tools=tools)
        asked.template_args = arguments
        assert rendered(of, asked, memo) == rendered(of, asked, NO_MEMO)


def test_a_turn_runs_only_the_rounds_that_it_adds() -> None:
    of, memo = template("demo"), TurnMemo()
    messages = [Message("user", [Text("hi")])]
    for number in range(30):
        messages = [
            *messages,
            Message("assistant", [Text(f"{number}")]),
            Message("user", [Text("x")]),
        ]
        asked = request(*messages)
        rendered(of, asked, memo)
    assert steps(of, asked, NO_MEMO) >= len(messages)
    assert steps(of, asked, memo) < 10


def steps(of: ChatTemplate, asked: GenerateRequest, memo: TurnMemo) -> int:
    """The rounds that a rendering runs."""
    counted, original = 0, sandbox.count_step

    def counting(context: Any, _: object = None) -> None:
        nonlocal counted
        counted += 1
        original(context)

    sandbox.count_step = counting
    try:
        rendered(of, asked, memo)
    finally:
        sandbox.count_step = original
    return counted
