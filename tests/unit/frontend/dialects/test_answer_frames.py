"""Prompts show earlier answers as they were generated."""

import re
from array import array
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from unit.frontend.dialects.recorded import TODAY, from_source, request, system, template, tool

from kvmesh.demo import model_dir
from kvmesh.frontend.conversation import (
    Block,
    Generated,
    GenerateRequest,
    Image,
    Message,
    RenderedPrompt,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.templates import answer_frames, sandbox
from kvmesh.frontend.tokenizer.encoder import TextEncoder
from kvmesh.frontend.tokenizer.prefix_cache import text_pieces

Role = Literal["tool", "user"]
ROLES: list[Role] = ["tool", "user"]
TOOLS = [tool("read", path={"type": "string"}), tool("grep", query={"type": "string"})]
ENDS = {
    "demo": ["<|im_end|>"],
    "chatml": ["<|im_end|>"],
    "last_query": ["<|im_end|>"],
    "no_end": ["<|user|>", "<|observation|>", "<|endoftext|>"],
    "channels": ["<|return|>", "<|call|>"],
    "numbered": ["<|im_end|>"],
    "trailing_ids": ["</s>"],
    "within_turn": ["<|end|>"],
}
TEMPLATES = {name: template(name) for name in ENDS}
COMPLETE = sorted(set(ENDS) - {"last_query", "trailing_ids"})  # show thinking of every turn


class Turn(NamedTuple):
    """An answer with its raw text, and what follows it."""

    blocks: list[Block]
    raw: str
    back: list[Message]


def shown(answer: list[Block], raw: str, opening: str | None) -> Message:
    tokens = array("I", range(len(raw))).tobytes()
    return Message("assistant", answer, Generated(opening or "", raw, tokens))


class Session:
    """A conversation whose answers are all known as they were generated."""

    def __init__(self, name: str, *messages: Message, **fields: Any) -> None:
        self.template = TEMPLATES[name]
        self.ends = frozenset(ENDS[name])
        self.messages = [*messages] or [Message("user", [Text("hi")])]
        self.fields: dict[str, Any] = {"tools": TOOLS, **fields}
        self.prompt = self.ask()

    def ask(self, **fields: Any) -> RenderedPrompt:
        asked = request(*self.messages, **{**self.fields, **fields})
        return self.template.prompt(asked, TODAY, self.ends)

    def as_sent(self) -> str:
        plain = [Message(message.role, message.blocks) for message in self.messages]
        return self.template.render(request(*plain, **self.fields), TODAY)

    def turn(self, turn: Turn, **fields: Any) -> bool:
        """True if the next prompt continues this one and the answer."""
        asked = request(*self.messages, **{**self.fields, **fields})
        before = self.ask(**fields).text + turn.raw
        opening = self.template.opening(asked, TODAY)
        self.messages += [shown(turn.blocks, turn.raw, opening), *turn.back]
        self.prompt = self.ask(**fields)
        return self.prompt.text.startswith(before)

    def raws(self) -> list[str]:
        return [self.prompt.text[i.start : i.end] for i in self.prompt.insertions]


def called(number: int, *names: str) -> list[Block]:
    return [ToolCall(f"c{number}-{i}", name, '{"path": "a"}') for i, name in enumerate(names)]


def found(*calls: Block, role: Role = "tool") -> Message:
    """The results of calls, in the role that the API gives them."""
    ids = [call.id for call in calls if isinstance(call, ToolCall)]
    return Message(role, [ToolResult(each, [Text(f"result of {each}")]) for each in ids])


def user(text: str = "Go on.") -> Message:
    return Message("user", [Text(text)])


WORDS = st.sampled_from(
    ["look", "é\n {{ x }}", "<|im_end|>", "</think>\n\n\n", '{"a":1}', "[CALL_ID]", "\ue000", " "]
)
NAMES = st.sampled_from(["read", "grep"])
RAW = st.lists(WORDS, min_size=1, max_size=4).map("".join)


@st.composite
def sessions(draw: st.DrawFn, alone: bool = False) -> list[Turn]:
    """The turns of a session; `alone`: at most one call in each."""
    turns, calls = [], 0
    for number in range(draw(st.integers(1, 5))):
        thinking: list[Block] = draw(st.lists(st.builds(Thinking, WORDS), max_size=1))
        text: list[Block] = list(draw(st.lists(st.builds(Text, WORDS), max_size=1)))
        names = draw(st.lists(NAMES, max_size=1 if alone else 3))
        blocks = [*thinking, *text, *called(number, *names)]
        if not names and not text:
            blocks.append(Text("ok"))
        ids = [f"functions.{n}:{calls + i} call{calls + i:05d}" for i, n in enumerate(names)]
        calls += len(names)
        role = draw(st.sampled_from(ROLES))
        back = [found(*blocks, role=role)] if names else [user(draw(WORDS))]
        if draw(st.booleans()) and names:
            back.append(user(draw(WORDS)))
        turns.append(Turn(blocks, draw(RAW) + "".join(ids), back))
    return turns


@pytest.mark.parametrize("name", COMPLETE)
@given(data=st.data(), thinking=st.sampled_from([None, True, False]))
def test_a_prompt_continues_the_one_before_and_its_answer(
    name: str, data: st.DataObject, thinking: bool | None
) -> None:
    session = Session(name, thinking=thinking)
    turns = data.draw(sessions(alone=name == "channels"))
    assert all(session.turn(turn) for turn in turns)
    assert session.raws() == [turn.raw for turn in turns]


@pytest.mark.parametrize("name", sorted(ENDS))
@given(turns=sessions(), late=st.sampled_from(["system", "user", "assistant"]))
def test_no_part_of_a_conversation_is_lost(name: str, turns: list[Turn], late: Any) -> None:
    session = Session(name)
    for number, turn in enumerate(turns):
        if number:
            session.messages.append(Message(late, [Text("in between")]))
        session.turn(turn)
        assert answer_frames._KEY not in session.prompt.text
        assert set(session.raws()) <= {turn.raw for turn in turns}
        plain = session.as_sent()
        results = [b for m in session.messages for b in m.blocks if isinstance(b, ToolResult)]
        for text in ["in between", *(f"result of {result.call_id}" for result in results)]:
            assert session.prompt.text.count(text) == plain.count(text)


@pytest.mark.parametrize("role", ROLES)
def test_thinking_that_a_template_drops_is_gone_after_the_user_s_next_message(role: Role) -> None:
    session = Session("last_query")
    blocks = [Thinking("I see."), Text("Let me."), *called(0, "read")]
    assert session.turn(Turn(blocks, "RAW0", [found(*blocks, role=role)]))
    calls = called(1, "read")
    assert session.turn(Turn(calls, "RAW1", [found(*calls, role=role)]))
    assert session.raws() == ["RAW0", "RAW1"]
    assert not session.turn(Turn([Thinking("So."), Text("Done.")], "RAW2", [user()]))
    assert session.raws() == ["RAW1"]
    assert "I see." not in session.prompt.text
    before = session.prompt.text
    blocks = [Thinking("Again."), *called(3, "grep")]
    assert session.turn(Turn(blocks, "RAW3", [found(*blocks, role=role)]))
    assert session.prompt.text.startswith(before)
    assert session.raws() == ["RAW1", "RAW3"]


def test_an_opening_that_history_does_not_show_is_kept() -> None:
    session = Session("last_query", thinking=False)
    assert session.turn(Turn(called(0, "read"), "RAW", [found(*called(0, "read"))]))
    assert "<think>\n\n</think>\n\nRAW<|im_end|>" in session.prompt.text


def test_an_answer_after_a_result_has_no_opening_within_a_turn() -> None:
    session = Session("within_turn")
    for number in range(3):
        calls = called(number, "read")
        assert session.turn(Turn(calls, f"RAW{number}", [found(*calls)]))
    assert session.prompt.text.count("<|assistant|>") == 1
    assert session.turn(Turn([Text("Done.")], "RAW3", [user()]))
    assert session.prompt.text.endswith("RAW3<|end|><|user|>Go on.<|assistant|>")


def test_results_are_named_by_the_ids_that_the_answer_shows() -> None:
    for name, raw in (("numbered", "functions.read:{}"), ("trailing_ids", "call0000{}")):
        session = Session(name)
        for number in range(3):
            calls = called(number, "read")
            assert session.turn(Turn(calls, "RAW" + raw.format(number), [found(*calls)]))
            assert session.prompt.text.count(raw.format(number)) == 2
        calls = called(3, "read")
        assert not session.turn(Turn(calls, "RAW with another id", [found(*calls)]))
        assert "RAW with another id" not in session.prompt.text
        assert len(session.raws()) == 3


def test_parallel_calls_that_a_template_cannot_show_are_shown_one_by_one() -> None:
    session = Session("channels")
    calls = called(0, "read", "grep")
    assert not session.turn(Turn(calls, "RAW", [found(*calls)]))
    assert session.raws() == []
    assert session.prompt.text.count("to=functions.") == 2


def test_results_may_be_missing_or_in_another_order() -> None:
    for name in COMPLETE:
        if name == "channels":
            continue
        session = Session(name)
        calls = called(0, "read", "grep", "read")
        raw = "RAW functions.read:0 functions.grep:1 functions.read:2"
        assert session.turn(Turn(calls, raw, [found(calls[2], calls[0]), user()]))
        assert session.raws() == [raw]


def test_arguments_of_the_template_and_tools_frame_answers_anew() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A{{ style }}:{{ m.content }};"
        "{% else %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A{{ style }}:{% endif %}"
    )
    chat = from_source(source)
    answer = shown([Text("ok")], "RAW", "A1:")
    for style in ("1", "2"):
        asked = request(user("hi"), answer, user(), template_args={"style": style})
        assert chat.prompt(asked, TODAY).text == f"user:hi;A1:RAW;user:Go on.;A{style}:"
    large = request(user("hi"), answer, user(), template_args={"style": "1" * 1000})
    assert "RAW" not in chat.prompt(large, TODAY).text


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}{{ m.content }};{% endfor %}",  # twice
        "{% for m in messages %}{{ m.content[:20] }};{% endfor %}",  # cut
        "{% for m in messages %}{{ m.content | upper }};{% endfor %}",  # changed
        "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}",  # hidden
        "{{ messages[-1].content }}{% for m in messages %}{{ m.content }};{% endfor %}",
        "{% for m in messages | reverse %}{{ m.role }}{{ m.content }};{% endfor %}",
        "{% for m in messages %}{{ 'x' * 5000 }}{{ m.content }}{% endfor %}",  # a large frame
    ],
)
def test_templates_that_show_an_answer_otherwise_show_it_as_sent(source: str) -> None:
    chat = from_source(source)
    plain = request(user("hi"), Message("assistant", [Text("Said.")]), user("and"))
    known = request(user("hi"), shown([Text("Said.")], "RAW", ""), user("and"))
    assert chat.prompt(known, TODAY).text == chat.render(plain, TODAY)


def test_a_template_that_refuses_the_small_conversation_shows_answers_as_sent() -> None:
    source = (
        "{% if messages[0].content | length < 2 %}{{ raise_exception('short') }}{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    known = [user("long"), shown([Text("b")], "RAW", ""), user("c")]
    assert "assistant:b;" in from_source(source).prompt(request(*known), TODAY).text


def test_a_template_that_refuses_markers_shows_answers_as_sent() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 > 4 and m.content | length > 20 %}"
        "{{ raise_exception(m.content) }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    answers = [shown([Text("ok")], f"RAW{number}", "") for number in range(3)]
    known = [part for answer in answers for part in (user(), answer)]
    prompt = from_source(source).prompt(request(*known, user()), TODAY)
    assert prompt.text.count("assistant:ok;") == 3
    with pytest.raises(TemplateError) as refused:
        from_source(source).prompt(request(*known, user("x" * 30)), TODAY)
    assert answer_frames._KEY not in str(refused.value)


def test_clients_cannot_forge_markers() -> None:
    forged = ["kvm0n0a", "kvm0123456789abcdef0n0a", "\ue000kvmesh0a\ue000", "kvmn0tkvmn0akvmn0c"]
    session = Session("chatml", user(" ".join(forged)))
    blocks: list[Block] = [Text(forged[0])]
    assert session.turn(Turn(blocks, "RAW", [user(forged[1])]))
    assert session.raws() == ["RAW"]
    assert all(text in session.prompt.text for text in forged)
    assert re.fullmatch(r"kvm[0-9a-f]{16}n", answer_frames._KEY)


def test_a_continued_message_follows_answers_as_they_were_generated() -> None:
    session = Session("chatml")
    assert session.turn(Turn([Text("Done.")], "RAW", [user()]))
    session.messages.append(Message("assistant", [Text("The begi")]))
    prompt = session.ask(template_args={"continue_final_message": True})
    assert prompt.text.endswith("The begi")
    assert [prompt.text[i.start : i.end] for i in prompt.insertions] == ["RAW"]


def test_images_deferred_tools_and_system_messages_do_not_move_answers() -> None:
    late = Tool("late", "", {"type": "object"}, deferred=True)
    session = Session("demo", system("Be brief."), user(), tools=[*TOOLS, late])
    calls = called(0, "read", "late")
    picture = Message("user", [Text("See"), Image("http://x/y.png"), Text("this.")])
    noted = ToolResult("c0-0", [Text("found")], references=["late"])
    back = [Message("tool", [noted, ToolResult("c0-1", [])]), system("New rule."), picture]
    assert session.turn(Turn(calls, "RAW", back))
    assert session.raws() == ["RAW"]


def conversation(turns: int) -> GenerateRequest:
    messages = [user("hi")]
    for number in range(turns):
        blocks = [Thinking("I see. " * 20), Text("So. " * 9), *called(number, "read")]
        generated = Generated("<|assistant|>", "RAW " * 80, b"")
        messages.append(Message("assistant", blocks, generated))
        messages.append(found(*blocks))
    return request(*messages, tools=TOOLS)


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of messages of each rendering."""
    counts: list[int] = []
    render = sandbox.render

    def counted(chat: Any, variables: dict[str, Any], *rest: Any) -> str:
        counts.append(len(variables["messages"]))
        return render(chat, variables, *rest)

    monkeypatch.setattr(sandbox, "render", counted)
    return counts


def test_a_long_conversation_is_rendered_once(rendered: list[int]) -> None:
    chat, ends = TEMPLATES["no_end"], frozenset(ENDS["no_end"])
    assert len(chat.prompt(conversation(200), TODAY, ends).insertions) == 200
    assert [count for count in rendered if count > 5] == [401]
    rendered.clear()
    chat.prompt(conversation(200), TODAY, ends)
    assert rendered == [401]


@pytest.mark.parametrize("name", ["last_query", "within_turn"])
def test_answers_that_a_template_hides_cost_one_rendering_more_at_most(
    name: str, rendered: list[int]
) -> None:
    asked = conversation(20)
    asked.messages += [user(), *conversation(20).messages[1:]]
    chat, ends = TEMPLATES[name], frozenset(ENDS[name])
    chat.prompt(asked, TODAY, ends)
    rendered.clear()
    chat.prompt(asked, TODAY, ends)
    assert len(rendered) <= 2


def test_the_tokens_of_an_answer_are_the_generated_ones() -> None:
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    encoder = TextEncoder(tokenizer)
    session = Session("demo")
    raw = "Let me see.\n<tool_call>"
    odd = [i for letter in raw for i in tokenizer.encode(letter, add_special_tokens=False).ids]
    opening = session.template.opening(request(*session.messages, tools=TOOLS), TODAY)
    generated = Generated(opening or "", raw, array("I", odd).tobytes())
    calls = called(0, "read")
    session.messages += [Message("assistant", calls, generated), found(*calls)]
    rendered = session.ask()
    pieces = text_pieces(rendered, encoder)
    assert "".join(piece.text for piece in pieces) == rendered.text
    assert [piece for piece in pieces if piece.tokens is not None] == [(raw, generated.tokens)]
    inside = rendered.insertions[0].end
    assert not any(piece.tokens for piece in text_pieces(rendered, encoder, inside))
