"""Nothing but thinking is lost of an answer, whatever a template shows."""

import datetime

import pytest
from unit.frontend.dialects.recorded import (
    TODAY,
    assistant,
    call,
    from_source,
    request,
    result,
    system,
    tool,
    user,
)

from kvmesh.frontend.conversation import Message, Thinking, ToolCall
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.output import choose_grammar
from kvmesh.frontend.dialects.preview import merge_deltas
from kvmesh.frontend.dialects.templates.capabilities import TemplateCapabilities
from kvmesh.frontend.dialects.templates.variants import MAX_VALUE, MAX_VARIANTS

CALLS = (
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }})"
    "{% endfor %}"
)
LOOP = [
    user("ask"),
    assistant(Thinking("hm"), "Look.", call("f", x=1)),
    result("back"),
]
LATER = [*LOOP, assistant("done"), user("next")]


def shown(source: str, *messages: Message, thinking: bool | None = None) -> str:
    return from_source(source).render(request(*messages, thinking=thinking), TODAY)


def each(answer: str) -> str:
    """A template of messages in brackets; `answer` writes those of the assistant."""
    return (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}[{{{{ m.content }}}}]{{% endif %}}"
        "{% endfor %}"
    )


def test_a_template_without_thinking_shows_text_and_calls() -> None:
    prompt = shown(each("<{{ m.content }}" + CALLS + ">"), *LATER)
    assert prompt == '[ask]<Look.(f {"x": 1})>[back]<done>[next]'


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_a_request_s_switch_decides_what_is_shown(name: str) -> None:
    source = each(
        f"<{{% if {name} %}}{{{{ m.reasoning_content }}}}|{{% endif %}}{{{{ m.content }}}}{CALLS}>"
    )
    assert shown(source, *LOOP, thinking=True) == '[ask]<hm|Look.(f {"x": 1})>[back]'
    assert shown(source, *LOOP, thinking=False) == '[ask]<Look.(f {"x": 1})>[back]'
    assert shown(source, *LOOP) == '[ask]<Look.(f {"x": 1})>[back]'


def test_an_answer_of_thinking_alone_is_left_out_where_a_template_fails_with_it() -> None:
    failing = "{% if not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}"
    source = each(failing + "<{{ m.content }}" + CALLS + ">")
    messages = [user("ask"), assistant(Thinking("hm")), user("next")]
    assert shown(source, *messages) == "[ask][next]"
    assert shown(each("<{{ m.content }}>"), *messages) == "[ask]<>[next]"


def test_a_template_that_fails_with_tools_gets_none() -> None:
    failing = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    prompt = from_source(failing + each("<{{ m.content }}>")).render(
        request(user("ask"), tools=[tool("look")]), TODAY
    )
    assert "look" in prompt
    assert "ask" in prompt


def test_a_template_that_fails_with_thinking_gets_none() -> None:
    source = each(
        "{% if m.reasoning_content and not deep %}{{ raise_exception('none') }}{% endif %}"
        "<{{ m.reasoning_content }}{{ m.content }}" + CALLS + ">"
    )
    assert shown(source, *LOOP) == '[ask]<Look.(f {"x": 1})>[back]'
    deep = request(*LOOP, template_args={"deep": True})
    assert from_source(source).render(deep, TODAY) == '[ask]<hmLook.(f {"x": 1})>[back]'


def test_text_that_would_go_with_earlier_thinking_is_a_message_of_its_own() -> None:
    source = each(
        "{% if m.tool_calls %}{% if loop.index0 > ns.last %}{% if m.thinking and m.content %}"
        "{{ raise_exception('one of them') }}{% endif %}/{{ m.thinking or m.content }}/{% endif %}"
        + CALLS
        + "{% else %}<{{ m.content }}>{% endif %}"
    )
    assert shown(source, *LOOP) == '[ask]/hm\n\nLook./(f {"x": 1})[back]'
    assert shown(source, *LATER) == '[ask]<Look.>(f {"x": 1})[back]<done>[next]'


def test_calls_beside_text_become_text_where_a_template_allows_nothing_else() -> None:
    source = (
        "{% set ns = namespace(user=true) %}{% for m in messages %}{% if not m.tool_calls and "
        "m.role != 'tool' %}{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles') }}"
        "{% endif %}{% set ns.user = not ns.user %}{% endif %}{% if m.tool_calls %}[TOOL_CALLS]"
        + CALLS
        + "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    prompt = shown(source, *LATER)
    assert prompt == (
        '[ask][Look.\n[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]]'
        "[<tool_response>\nback\n</tool_response>][done][next]"
    )


def test_system_messages_that_do_not_stay_move_to_the_user() -> None:
    last = (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% endif %}"
        "{% for m in messages if m.role != 'system' %}[{% if loop.last and m.role == 'user' %}"
        "{{ s }} {% endif %}{{ m.content }}]{% endfor %}"
    )
    assert shown(last, system("S"), user("a"), assistant("b"), user("c")) == "[S\n\na][b][ c]"
    needs_user = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('no user') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"
    )
    assert shown(needs_user, system("S")) == "[user S]"
    assert shown(needs_user, system("S"), user("a")) == "[system S][user a]"


def test_text_after_calls_comes_before_them_if_the_results_must_follow() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' and loop.previtem.role == 'assistant' and "
        "not loop.previtem.tool_calls %}{{ raise_exception('no call') }}{% endif %}"
        f"[{{{{ m.content }}}}{CALLS}]{{% endfor %}}"
    )
    turn = [user("a"), assistant("one", call("f"), "two"), result("r")]
    assert shown(source, *turn) == "[a][one\n\ntwo(f {})][r]"


MUTATES = (
    "<|tool_calls_section_begin|>{% for m in messages %}{% if m.tool_calls %}{% set x = [] %}"
    "{% set _ = x.append(1) %}{% endif %}[{{ m.content }}]{% endfor %}{{ tools | tojson }}"
)


def test_a_template_that_changes_lists_has_a_fault_and_calls_in_its_parser_s_form() -> None:
    chat = from_source(MUTATES)
    assert "'append' of 'list'" in chat.fault
    asked = request(user("a"), assistant("Look.", call("f", x=1), call("g")), tools=[tool("f")])
    prompt = chat.render(asked, TODAY)
    written = prompt[prompt.index("Look.") : prompt.rindex("][{")]
    parser = choose_grammar("m", chat).parser([tool("f")], eager=False)
    pieces = merge_deltas(parser.feed(written) + parser.finish())
    assert [piece[:2] for piece in pieces if piece[0] == "call"] == [("call", "f"), ("call", "g")]
    assert from_source(each("{{ m.content }}")).fault == ""
    assert from_source("{{ bos_token }}").fault == "shows no message of a user"


@pytest.mark.parametrize(
    ("sign", "parser"),
    [
        ("", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<｜tool▁sep｜>", "deepseek_v3_1"),
        ("<｜tool▁sep｜>```json", "deepseek_v3"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<function=", "functionary"),
        ("<TOOLCALL>", "nemotron_deci"),
        ("<tool_calls>", "jamba"),
    ],
)
def test_calls_as_text_are_those_that_the_parser_reads(sign: str, parser: str) -> None:
    chat = from_source("{# " + sign + " #}{% for m in messages %}\x00{{ m.content }}{% endfor %}")
    calls = [ToolCall("1", "f", '{"x": "é"}'), ToolCall("2", "g", "{}")]
    prompt = chat.render(request(user("a"), assistant("Look.", *calls), tools=[tool("f")]), TODAY)
    grammar = choose_grammar("m", chat)
    assert (chat.plain_parser, grammar.tool_parser) == (parser, parser)
    reader = grammar.parser([tool("f"), tool("g")], eager=False)
    pieces = merge_deltas(reader.feed(prompt.split("\x00")[-1]) + reader.finish())
    assert pieces[0] == ("text", "", "Look.\n") or pieces[0] == ("text", "", "Look.")
    assert [piece for piece in pieces if piece[0] == "call"] == [
        ("call", "f", '{"x": "é"}'),
        ("call", "g", "{}"),
    ]


def test_switches_are_probed_once_and_only_those_that_the_template_reads() -> None:
    rendered: list[str] = []
    chat = from_source(each("{{ mode }}{{ m.content }}" + CALLS))
    variants = chat._select(True)
    render = variants.render

    def counted(*args: object, **kwargs: object) -> str:
        rendered.append("")
        return render(*args, **kwargs)  # type: ignore[arg-type]

    variants.render = counted  # type: ignore[method-assign]
    assert variants.capabilities({}) is variants.default
    for ignored in ({"other": 1}, {"mode": ["a"]}, {"mode": "x" * (MAX_VALUE + 1)}):
        assert variants.capabilities(ignored) is variants.default
    assert not rendered
    first = variants.capabilities({"mode": "a", "other": 1})
    probes = len(rendered)
    assert isinstance(first, TemplateCapabilities)
    assert variants.capabilities({"mode": "a"}) is first
    assert len(rendered) == probes
    for number in range(2 * MAX_VARIANTS):
        variants.capabilities({"mode": number})
    assert len(variants._known) <= MAX_VARIANTS


def test_a_request_with_a_broken_switch_is_an_error_of_its_own() -> None:
    chat = from_source("{% if mode == 'bad' %}{{ raise_exception('bad mode') }}{% endif %}ok")
    with pytest.raises(TemplateError, match="bad mode"):
        chat.render(request(user("a"), template_args={"mode": "bad"}), datetime.date(2026, 1, 1))
