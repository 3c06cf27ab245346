import datetime
import gc
import json

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from unit.frontend.dialects.recorded import (
    CONFIG,
    TEMPLATES,
    TODAY,
    assistant,
    call,
    from_source,
    request,
    result,
    system,
    template,
    tool,
    user,
)

from kvmesh.frontend.conversation import Image, Message, Text, Thinking, Tool, ToolCall
from kvmesh.frontend.dialects.errors import TemplateError
from kvmesh.frontend.dialects.templates import sandbox
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate

SHOW = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def test_a_conversation_with_tools_renders_in_the_model_s_format() -> None:
    prompt = template("chatml").render(
        request(
            system("Be brief."),
            user("What is in a.txt?"),
            assistant(Thinking("Read it."), "Let me see.", call("read", path="é<a>.txt")),
            result("hello"),
            tools=[tool("read", path={"type": "string"})],
        ),
        TODAY,
    )
    listed = json.dumps(
        {
            "type": "function",
            "function": {
                "name": "read",
                "description": "Does read.",
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
            },
        }
    )
    assert prompt == (
        f"<|im_start|>system\nBe brief.\n\n<tools>\n{listed}\n</tools><|im_end|>\n"
        "<|im_start|>user\nWhat is in a.txt?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nRead it.\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "read", "arguments": {"path": "é<a>.txt"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nhello\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": SHOW.encode(), "chat_template.json": b"{}"},
        {"chat_template.json": json.dumps({"chat_template": SHOW}).encode()},
        {"tokenizer_config.json": json.dumps({"chat_template": SHOW}).encode()},
        {
            "tokenizer_config.json": json.dumps(
                {"chat_template": [{"name": "default", "template": SHOW}]}
            ).encode()
        },
    ],
)
def test_templates_are_found_in_every_file(files: dict[str, bytes]) -> None:
    assert ChatTemplate(files).render(request(user("hi")), TODAY) == "[user:hi]"


def test_a_tool_use_template_serves_requests_with_tools() -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    chat = ChatTemplate({"tokenizer_config.json": json.dumps({"chat_template": named}).encode()})
    assert chat.render(request(user("hi")), TODAY) == "d"
    assert chat.render(request(user("hi"), tools=[tool("x")]), TODAY) == "t"


NAMED = "additional_chat_templates/tool_use.jinja"
OLDER = json.dumps({"chat_template": "d"}).encode()


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"chat_template.jinja": b"d", NAMED: b"t"}, "d", "t"),
        ({"tokenizer_config.json": OLDER, NAMED: b"t"}, "d", "t"),
        ({"chat_template.jinja": b"d", "additional_chat_templates/rag.jinja": b"r"}, "d", "d"),
        ({NAMED: b"t"}, "t", "t"),
    ],
)
def test_additional_templates_come_beside_the_first(
    files: dict[str, bytes], plain: str, with_tools: str
) -> None:
    chat = ChatTemplate(files)
    assert chat.render(request(user("hi")), TODAY) == plain
    assert chat.render(request(user("hi"), tools=[tool("x")]), TODAY) == with_tools


def test_a_chat_without_a_template_is_an_error() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate({"tokenizer_config.json": CONFIG}).render(request(user("hi")), TODAY)


def test_broken_files_and_templates_fail_at_load() -> None:
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json is not JSON"):
        ChatTemplate({"tokenizer_config.json": b"{"})
    with pytest.raises(TemplateError, match="line 2"):
        from_source("{% if x %}\n{% endfor %}")


def test_the_template_s_exception_is_the_error() -> None:
    with pytest.raises(TemplateError, match=r"^Conversation roles must alternate user"):
        template("mistral").render(request(assistant("hi")), TODAY)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'a' * 10**9 }}",
        "{% set ns = namespace(s='aaaaaaaa') %}"
        "{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}"
        "{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 9 ** 9999 }}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
    ],
)
def test_no_template_escapes_the_sandbox_or_its_limits(source: str) -> None:
    with pytest.raises(TemplateError):
        from_source(source).render(request(user("hi")), TODAY)


@pytest.mark.parametrize(
    "source",
    [
        "{{ m.content }} {{ m.keys() | list }} {{ m.none is defined }} {{ m['items'] is defined }}",
        "{{ m.__class__ }}",
        "{{ m.pop('role') }}",
        "{{ 'a{}'.format('b') }} {{ '{0.__class__}'.format('b') }}",
        "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
        "{{ 'a-b'.split('-', maxsplit=1) }} {{ 'a'.nothing is defined }} {{ ''.__class__ }}",
        "{% for c in 'ab' %}{{ loop.index }}{{ loop.last }}{{ loop._iterable }}"
        "{{ c.upper() }}{{ loop.cycle('x', 'y') }}{% endfor %}",
        "{% set ns = namespace(f='{0.__class__}'.format, none=none) %}"
        "{{ ns.f(1) }} {{ ns.none }} {{ ns.other is defined }} {{ ns.__class__ }}",
    ],
)
def test_fast_paths_of_the_sandbox_give_its_results(source: str) -> None:
    def rendered(environment: ImmutableSandboxedEnvironment) -> str:
        try:
            return environment.from_string(source).render(m={"role": "user", "content": "hi"})
        except SecurityError as error:
            return str(error)

    assert rendered(sandbox.Environment()) == rendered(ImmutableSandboxedEnvironment())


def test_the_billing_header_is_dropped() -> None:
    chat = from_source(SHOW)
    header = "x-anthropic-billing-header: cc_version=2.1; cch=77a;"
    plain = chat.render(request(system("Be brief."), user("hi")), TODAY)
    assert chat.render(request(system(header, "Be brief."), user("hi")), TODAY) == plain
    in_one = system(f"{header}\n\nBe brief.")
    assert chat.render(request(in_one, user("hi")), TODAY) == plain
    assert header in chat.render(request(user(header)), TODAY)


def test_a_deferred_tool_is_shown_where_it_is_referenced() -> None:
    tools = [tool("find"), tool("grep", deferred=True)]
    prompt = template("chatml").render(
        request(
            user("hi"),
            assistant(call("find")),
            result("", references=["grep", "gone"]),
            tools=tools,
        ),
        TODAY,
    )
    head, tail = prompt.split("</tools>")
    assert "grep" not in head
    assert '"name": "grep"' in tail
    assert "Tool gone is available." in tail


def test_ids_depend_only_on_the_index_of_a_call() -> None:
    def prompt(one: str, two: str) -> str:
        reply = assistant(call("a", one), call("b", two))
        back = [result("1", one), result("2", two)]
        return template("mistral").render(request(user("hi"), reply, *back), TODAY)

    assert prompt("toolu_1", "toolu_2") == prompt("x", "y")
    assert "[CALL_ID]call00001[ARGS]" in prompt("x", "y")


def test_strict_templates_get_alternating_roles() -> None:
    prompt = template("mistral").render(
        request(
            system("S"),
            user("a"),
            user("b"),
            assistant(call("f")),
            result("r"),
            user("and?"),
            assistant("c"),
            system("late"),
            user("d"),
        ),
        TODAY,
    )
    assert prompt == (
        "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]a\n\nb[/INST]"
        "[TOOL_CALLS]f[CALL_ID]call00000[ARGS]{}</s>"
        '[TOOL_RESULTS]{"content": "r\\n\\nand?", "call_id": "call00000"}[/TOOL_RESULTS]'
        "c</s>[INST]late\n\nd[/INST]"
    )


def test_a_template_without_system_or_tools_gets_both_as_text() -> None:
    prompt = template("gemma").render(
        request(
            system("S"),
            user("a"),
            assistant("Hm.", call("f", x=1)),
            result("r"),
            tools=[tool("f")],
        ),
        TODAY,
    )
    assert prompt.startswith("<s><start_of_turn>user\nS\n\na\n\nYou can call functions.")
    assert '{"name": "f", "description": "Does f."' in prompt
    assert prompt.endswith(
        'model\nHm.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><end_of_turn>\n'
        "<start_of_turn>user\n<tool_response>\nr\n</tool_response><end_of_turn>\n"
        "<start_of_turn>model\n"
    )


def test_templates_with_text_arguments_and_no_content() -> None:
    prompt = template("deepseek").render(
        request(user("a"), assistant(call("f", x=1)), result("r")), TODAY
    )
    assert '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>' in prompt


def test_templates_with_parts_and_images() -> None:
    image = Message(role="user", blocks=[Text("see"), Image("data:x"), Text("?")])
    assert template("parts").render(request(image), TODAY) == "<user>see<image>?"
    assert template("parts").render(request(user("hi")), TODAY) == "<user>hi"
    rendered_prompt = template("parts").render(
        request(system("Be brief."), user("hi"), tools=[tool("read")]), TODAY
    )
    assert rendered_prompt.startswith("<system>Be brief.")
    assert '"name": "read"' in rendered_prompt


def test_thinking_and_text_and_calls_keep_their_order() -> None:
    reply = assistant(
        Thinking("one"), call("f", "1"), Thinking("two"), "said", call("g", "2"), "after"
    )
    prompt = template("demo").render(
        request(user("a"), reply, result("r", "1"), result("s", "2")), TODAY
    )
    places = [prompt.index(word) for word in ("one", '"f"', "two", "said", '"g"', "after")]
    assert places == sorted(places)


def test_thinking_flags_and_template_args_reach_the_template() -> None:
    chat = from_source("{{ enable_thinking }} {{ thinking }} {{ effort }} {{ messages | length }}")
    asked = request(user("a"), thinking=False, template_args={"effort": "high", "messages": []})
    assert chat.render(asked, TODAY) == "False False high 1"
    assert from_source("{{ enable_thinking is defined }}").render(request(user("a")), TODAY) == (
        "False"
    )


def test_the_date_is_the_one_given() -> None:
    chat = from_source("{{ strftime_now('%Y-%m-%d %H:%M') }}")
    assert chat.render(request(user("a")), datetime.date(2025, 2, 3)) == "2025-02-03 00:00"


def test_the_last_assistant_message_can_be_continued() -> None:
    open_end = {"continue_final_message": True}
    prompt = template("chatml").render(
        request(user("a"), assistant("Once upon"), template_args=open_end), TODAY
    )
    assert prompt.endswith("<|im_start|>assistant\nOnce upon")
    with pytest.raises(TemplateError, match="only an assistant message"):
        template("chatml").render(request(user("a"), template_args=open_end), TODAY)


@pytest.mark.parametrize("name", ["demo", *sorted(p.stem for p in TEMPLATES.glob("*.jinja"))])
@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("before", [(), (Thinking("Hm."),)])
def test_every_template_can_continue(
    name: str, thinking: bool | None, before: tuple[Thinking, ...]
) -> None:
    open_end = {"continue_final_message": True}
    messages = user("a"), assistant(*before, "Once upon \n")
    asked = request(*messages, template_args=open_end, thinking=thinking)
    assert template(name).render(asked, TODAY).endswith("Once upon \n")


def test_namespaced_and_free_text_tools_are_functions_to_the_model() -> None:
    patch = Tool("apply_patch", "Patch.", {}, custom=True, grammar="start: line+")
    remote = Tool("read", "Read.", {"type": "object"}, namespace="files")
    reply = assistant(
        ToolCall("1", "apply_patch", "*** Begin", custom=True),
        ToolCall("2", "read", '{"p": 1}', namespace="files"),
        ToolCall("3", "read", "not json", namespace="files"),
    )
    prompt = template("chatml").render(request(user("a"), reply, tools=[patch, remote]), TODAY)
    assert '{"name": "apply_patch", "arguments": {"input": "*** Begin"}}' in prompt
    assert '{"name": "files__read", "arguments": {"p": 1}}' in prompt
    assert '{"name": "files__read", "arguments": {"input": "not json"}}' in prompt
    assert "start: line+" in prompt


def test_tool_instructions_use_the_template_s_call_form() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
        "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}{% endfor %}"
    )
    chat = from_source(source)
    assert chat.plain_parser == "deepseek_v3_1"
    prompt = chat.render(request(system("S"), user("a"), tools=[tool("f")]), TODAY)
    assert prompt.startswith("system:S\n\nYou can call functions.")
    assert "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS" in prompt


def test_a_template_with_one_call_per_message_gets_each_with_its_result() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call only') }}{% endif %}"
        "({{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }})"
        "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    reply = assistant("Look.", call("f", "1"), call("g", "2"))
    back = [result("r", "1"), result("s", "2")]
    prompt = from_source(source).render(request(user("a"), reply, *back, user("b")), TODAY)
    assert prompt == "[a][Look.](f {})[r](g {})[s][b]"


def test_a_template_with_either_thinking_or_text_gets_both_as_thinking() -> None:
    source = (
        "{% for m in messages %}{% if m.thinking and m.content and m.tool_calls %}"
        "{{ raise_exception('not both') }}{% endif %}<{{ m.thinking }}>[{{ m.content }}]"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }} "
        "{{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
    )
    reply = assistant(Thinking("t"), "Look.", call("f"))
    prompt = from_source(source).render(request(user("a"), reply, result("r")), TODAY)
    assert prompt == "<>[a]<t\n\nLook.>[](f {})<>[r]"


def test_a_rendering_leaves_no_reference_cycles() -> None:
    macro = "{% macro show(m) %}[{{ m.content.strip() }}]{% endmacro %}"
    chat = from_source(macro + "{% for m in messages %}{{ show(m) }}{% endfor %}")
    conversation = request(user("hi"))
    chat.render(conversation, TODAY)
    gc.collect()
    assert chat.render(conversation, TODAY) == "[hi]"
    assert not gc.collect()
