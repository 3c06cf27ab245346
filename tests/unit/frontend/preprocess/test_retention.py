"""Retention directives in the fields of every API, and their token ranges."""

import asyncio
import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stamp import STAMP
from unit.frontend.dialects.recorded import TEMPLATES

from kvmesh.bus.messages import ModelCard, Retain, Sampling
from kvmesh.demo import model_dir
from kvmesh.frontend.apis.base import Api
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.completions import Completions
from kvmesh.frontend.apis.messages.api import Messages
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.conversation import (
    CacheControl,
    GenerateRequest,
    Message,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.dialects.templates.chat_messages import BILLING_HEADER
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.frontend.models import Dialect, ServedModel
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess.preprocessor import Preprocessor, PromptTokens

FILES = {file.name: file.read_bytes() for file in model_dir().iterdir()}
BLOCK = 16
LONG = "You are an agent who reads and writes files. " * 20
RESULT = "\n".join(f"{line}: some text of a file" for line in range(60))
MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
HOUR: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TOOL: dict[str, Any] = {
    "name": "read",
    "input_schema": {"type": "object", "properties": {"path": {}}},
}


def served(template: bytes | None = None) -> ServedModel:
    files = FILES if template is None else {**FILES, "chat_template.jinja": template}
    card = ModelCard(name="m", context=1 << 20, block_size=BLOCK, files="f")
    return ServedModel(card, Dialect(card, files), 0)


DEMO = served()


def prepared(api: Api, model: ServedModel = DEMO, **body: Any) -> tuple[PromptTokens, Any]:
    """(prompt, request) of a body."""
    call = api.parse(json.dumps({"model": "m", **body}).encode(), {}, STAMP)
    made = asyncio.run(Preprocessor(1 << 20, TenantNamespaces()).prepare(call.request, model, None))
    return made.prompts[0], made.request


def text(prompt: PromptTokens, start: int, end: int | None, model: ServedModel = DEMO) -> str:
    ids = array("I", prompt.tokens).tolist()[start:end]
    return model.dialect.tokenizer.decode(ids, skip_special_tokens=False)


def explicit(prompt: PromptTokens) -> list[Retain]:
    return [entry for entry in prompt.retention if entry.explicit]


def block(words: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **mark}


def exchange(number: int, **mark: Any) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": f"c{number}", "name": "read", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": f"{number} {RESULT}"}
    return [
        {"role": "assistant", "content": [block("Let me see."), call]},
        {"role": "user", "content": [{**result, **mark}]},
    ]


def conversation(turns: int, **mark: Any) -> list[dict[str, Any]]:
    before = [entry for number in range(turns - 1) for entry in exchange(number)]
    return [{"role": "user", "content": "hi"}, *before, *exchange(turns - 1, **mark)]


# --- cache_control of the Messages API ---


def test_a_mark_retains_the_prompt_through_its_block() -> None:
    prompt, _ = prepared(Messages(), max_tokens=1, messages=conversation(3, **MARK))
    (kept,) = explicit(prompt)
    assert (kept.start, kept.ttl_s) == (0, 300.0)
    assert kept.priority > 35
    assert text(prompt, 0, kept.end).endswith("59: some text of a file\n</tool_response>")


def test_a_mark_in_the_middle_of_the_system_prompt_is_exact() -> None:
    system = [block(LONG, **HOUR), block("Today is Saturday.")]
    prompt, _ = prepared(Messages(), max_tokens=1, system=system, messages=conversation(1))
    (kept,) = explicit(prompt)
    assert kept.ttl_s == 3600
    assert text(prompt, 0, kept.end).endswith(LONG.strip())


def test_a_mark_on_the_system_prompt_or_on_tools_retains_both() -> None:
    hello = [{"role": "user", "content": "hi"}]
    for system, tool in ((block(LONG, **MARK), TOOL), (block(LONG), {**TOOL, **MARK})):
        prompt, _ = prepared(
            Messages(), max_tokens=1, system=[system], tools=[tool], messages=hello
        )
        (kept,) = explicit(prompt)
        beginning = text(prompt, 0, kept.end)
        assert LONG.strip() in beginning
        assert '"read"' in beginning
        assert text(prompt, kept.end or 0, None).startswith("<|im_start|>user\nhi")


def test_marks_of_one_ttl_are_merged_and_the_longer_ttl_wins() -> None:
    system = [block(LONG, **HOUR)]
    first, second = conversation(1, **MARK), exchange(7, **MARK)
    prompt, _ = prepared(Messages(), max_tokens=1, system=system, messages=first + second)
    short, long = explicit(prompt)
    assert (short.ttl_s, long.ttl_s) == (300, 3600)
    assert (short.end or 0) > (long.end or 0)
    assert text(prompt, 0, short.end).endswith("</tool_response>")


def test_a_mark_on_a_short_text_retains_only_that_text() -> None:
    reply = [block("ok", **MARK), *exchange(0)[0]["content"]]
    messages = [*conversation(1), {"role": "assistant", "content": reply}, *conversation(1)]
    prompt, _ = prepared(Messages(), max_tokens=1, messages=messages)
    (kept,) = explicit(prompt)
    assert text(prompt, 0, kept.end).endswith("<|im_start|>assistant\nok")


def test_a_mark_on_a_rewritten_block_ends_before_or_with_it() -> None:
    call = {"type": "tool_use", "id": "c", "name": "read", "input": {"path": LONG}, **MARK}
    reply = {"role": "assistant", "content": [block("Let me see."), call, call]}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c"}
    back = {"role": "user", "content": [result]}
    prompt, _ = prepared(Messages(), max_tokens=1, messages=[*conversation(1), reply, back])
    (kept,) = explicit(prompt)
    assert text(prompt, 0, kept.end).rstrip().endswith("Let me see.")
    result["content"] = [block("", **MARK)]
    prompt, _ = prepared(Messages(), max_tokens=1, messages=[*conversation(1), back])
    (kept,) = explicit(prompt)
    assert kept.end == prompt.count


def test_a_request_may_be_marked_as_a_whole() -> None:
    prompt, _ = prepared(Messages(), max_tokens=1, messages=conversation(1), **MARK)
    assert explicit(prompt) == [Retain(0, None, 75, 300.0, explicit=True)]


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "gemma", "deepseek"])
def test_marks_are_found_under_every_template(name: str) -> None:
    model = served((TEMPLATES / f"{name}.jinja").read_bytes())
    messages = conversation(2, **MARK)
    messages[0] = {"role": "user", "content": [block(f"Read this: {LONG}", **HOUR)]}
    prompt, _ = prepared(Messages(), model, max_tokens=1, messages=messages)
    last, first = explicit(prompt)
    assert text(prompt, 0, first.end, model).rstrip().endswith("writes files.")
    beginning = text(prompt, 0, last.end, model)
    assert "1 0: some text" in beginning
    assert "59: some text of a file" in beginning[-100:]


# --- nvext and the OpenAI fields ---


SPAN = {"start": 16, "end": 64, "priority": 90, "duration_s": 30}


@pytest.mark.parametrize("api", [Chat(), Completions(), Messages(), Responses()])
def test_nvext_takes_token_ranges_on_every_endpoint(api: Api) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": LONG}]},
        "completions": {"prompt": LONG},
        "messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9},
        "responses": {"input": LONG},
    }
    plan = {"ranges": [SPAN, {"start": 64}], "decode": {"priority": 5}}
    nvext = {"retention": plan, "cache_control": {"ttl": "1h"}}
    prompt, request = prepared(api, **bodies[api.name], nvext=nvext)
    assert explicit(prompt) == [
        Retain(0, None, 75, 3600.0, explicit=True),
        Retain(16, 64, 90, 30.0, explicit=True),
        Retain(64, None, 35, None, explicit=True),
    ]
    assert request.decode == Retain(0, None, 5, None, "decode", True)
    as_list, _ = prepared(api, **bodies[api.name], nvext={"retention": [SPAN]})
    assert explicit(as_list) == [Retain(16, 64, 90, 30.0, explicit=True)]


WORDS = [
    ({"prompt_cache_retention": "24h"}, 86400.0),
    ({"prompt_cache_retention": "in_memory"}, None),
    ({"prompt_cache_retention": "in-memory"}, None),
    ({"prompt_cache_options": {"ttl": "30m"}}, 1800.0),
    ({"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}, None),
]


@pytest.mark.parametrize(("fields", "ttl"), WORDS)
def test_openai_s_fields_retain_the_whole_prompt(fields: dict[str, Any], ttl: float | None) -> None:
    surfaces: list[tuple[Api, str]] = [(Responses(), "input"), (Completions(), "prompt")]
    for api, name in surfaces:
        made, _ = prepared(api, **{name: LONG, **fields})
        assert [entry.ttl_s for entry in explicit(made)] == [ttl] * (ttl is not None)


def test_openai_s_breakpoints_are_marks() -> None:
    parts = [{**block(LONG), "prompt_cache_breakpoint": {}}, block("Now this.")]
    prompt, _ = prepared(Chat(), messages=[{"role": "user", "content": parts}])
    (kept,) = explicit(prompt)
    assert kept.ttl_s == 1800
    assert text(prompt, 0, kept.end).endswith(LONG.strip())


WRONG: list[tuple[Api, dict[str, Any], str]] = [
    (Chat(), {"nvext": {"retention": [{"start": 8, "end": 8}]}}, "nvext.retention[0].end"),
    (Chat(), {"nvext": {"retention": [{"priority": 1}]}}, "nvext.retention[0].start"),
    (Chat(), {"nvext": {"retention": {"decode": {"priority": 101}}}}, "nvext.retention.decode"),
    (Chat(), {"nvext": {"cache_control": {"ttl": "soon"}}}, "nvext.cache_control.ttl"),
    (Chat(), {"prompt_cache_retention": "long"}, "prompt_cache_retention"),
    (Messages(), {"cache_control": {"ttl": 5}}, "cache_control.ttl"),
]


@pytest.mark.parametrize(("api", "fields", "where"), WRONG)
def test_an_invalid_directive_is_named(api: Api, fields: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        prepared(api, messages=[{"role": "user", "content": "hi"}], max_tokens=1, **fields)
    assert (error.value.param or "").startswith(where)


# --- kinds ---


def kinds(prompt: PromptTokens) -> list[Retain]:
    return [entry for entry in prompt.retention if not entry.explicit]


def test_the_head_and_new_tool_results_get_their_kinds() -> None:
    prompt, _ = prepared(
        Messages(), max_tokens=1, system=LONG, tools=[TOOL], messages=conversation(5)
    )
    system, *tools = kinds(prompt)
    assert (system.kind, system.start) == ("system", 0)
    assert LONG[:200] in text(prompt, system.start, system.end)
    assert [entry.kind for entry in tools] == ["tool", "tool"]
    for entry, number in zip(tools, (3, 4), strict=True):
        assert entry.start % BLOCK == (entry.end or 0) % BLOCK == 0
        inner = text(prompt, entry.start, entry.end)
        assert "30: some text of a file" in inner
        around = text(prompt, entry.start - BLOCK, (entry.end or 0) + BLOCK)
        assert f"<tool_response>\n{number} 0: some" in around


DROPPING = (
    b"{%- set last = namespace(user=-1) -%}"
    b"{%- for m in messages if m.role == 'user' -%}"
    b"{%- set last.user = messages.index(m) -%}{%- endfor -%}"
    b"{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    b"{%- if m.reasoning_content and loop.index0 > last.user -%}"
    b"<think>\n{{ m.reasoning_content }}\n</think>\n{%- endif -%}"
    b"{{ m.content }}{%- for c in m.tool_calls or [] -%}<tool_call>{{ c.function | tojson }}"
    b"</tool_call>{%- endfor -%}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def test_thinking_has_a_kind_if_the_template_drops_it() -> None:
    thought = "The file has to be read before anything else. " * 10
    messages = conversation(1)
    messages[1]["content"].insert(0, {"type": "thinking", "thinking": thought})
    model = served(DROPPING)
    prompt, _ = prepared(Messages(), model, max_tokens=1, messages=messages)
    (thinking,) = [entry for entry in kinds(prompt) if entry.kind == "thinking"]
    assert text(prompt, thinking.start, thinking.end) in thought
    kept, _ = prepared(Messages(), DEMO, max_tokens=1, messages=messages)
    assert all(entry.kind != "thinking" for entry in kinds(kept))


def decode_kind(model: ServedModel, messages: list[dict[str, Any]], **body: Any) -> str | None:
    """The kind that the output's blocks get while they are generated."""
    call = Messages().parse(
        json.dumps({"model": "m", "max_tokens": 9, "messages": messages, **body}).encode(),
        {},
        STAMP,
    )
    made = asyncio.run(Preprocessor(1 << 20, TenantNamespaces()).prepare(call.request, model, None))
    return None if made.decode is None else made.decode.kind


THINKS = DROPPING.replace(b"assistant\n", b"assistant\n<think>\n")


def test_an_output_that_no_later_prompt_contains_is_of_the_kind_of_thinking() -> None:
    ask: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    silent = [*ask, {"role": "assistant", "content": "ho"}, *ask]
    thought = {"type": "thinking", "thinking": "so"}
    text_block = {"type": "text", "text": "ho"}
    returned = [*ask, {"role": "assistant", "content": [thought, text_block]}, *ask]
    model = served(THINKS)
    assert model.dialect.grammar.begins_thinking("<think>\n")
    assert decode_kind(model, ask) == "thinking"  # a new message must follow
    assert decode_kind(model, ask, tools=[TOOL]) is None  # a tool's result may follow
    assert decode_kind(model, silent, tools=[TOOL]) == "thinking"
    assert decode_kind(model, returned, tools=[TOOL]) is None
    assert decode_kind(served(DROPPING), silent) is None  # it may not think at all


PIECE = st.sampled_from(
    ["", " ", "ok", "hi\n", LONG, RESULT, "</think>", "<|im_end|>", BILLING_HEADER]
)
CACHE = st.sampled_from([None, CacheControl(300.0), CacheControl(3600.0)])
BLOCKS = st.one_of(
    st.builds(Text, PIECE, CACHE),
    st.builds(Thinking, PIECE),
    st.builds(ToolCall, st.just("c"), st.just("read"), st.just("{}"), cache=CACHE),
    st.builds(ToolResult, st.just("c"), st.lists(st.builds(Text, PIECE), max_size=2), cache=CACHE),
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.lists(st.builds(Message, ROLES, st.lists(BLOCKS, max_size=4)), max_size=8)
TOOLS = st.lists(
    st.builds(Tool, st.just("read"), st.just(""), st.just({}), cache=CACHE), max_size=1
)
MODELS = [DEMO, served(DROPPING)]


@given(MESSAGES, TOOLS, st.sampled_from(MODELS))
def test_directives_are_always_inside_the_prompt(
    messages: list[Message], tools: list[Tool], model: ServedModel
) -> None:
    request = GenerateRequest(id="r", model="m", sampling=Sampling(max_tokens=0))
    request.messages, request.tools = messages, tools
    try:
        made = asyncio.run(
            Preprocessor(1 << 20, TenantNamespaces()).prepare(request, model, None)
        ).prompts[0]
    except InvalidRequest:
        return  # the template raised, or rendered nothing
    for entry in made.retention:
        assert entry.end is not None
        assert 0 <= entry.start < entry.end <= made.count
        assert entry.explicit or entry.end % BLOCK == entry.start % BLOCK == 0


def test_a_prompt_of_tokens_has_no_kinds() -> None:
    prompt, _ = prepared(Completions(), prompt=[1, 2, 3] * 40)
    assert prompt.retention == []
