"""The Anthropic SDK on the Messages API."""

import secrets
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic, beta_async_tool
from anthropic.types import MessageParam, TextBlockParam, ThinkingBlock, ToolParam, ToolUseBlock
from anthropic.types.beta import (
    BetaCompact20260112EditParam,
    BetaContextManagementConfigParam,
    BetaMessageParam,
)
from support.frontend import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOOL: ToolParam = {
    "name": "get_weather",
    "description": "Tells it.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
ASK: MessageParam = {"role": "user", "content": "How is the weather in Oslo?"}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:
        yield client


async def test_a_stream_carries_thinking_text_and_a_tool_call(client: AsyncAnthropic) -> None:
    async with client.messages.stream(
        model=MODEL, max_tokens=200, messages=[ASK], tools=[TOOL]
    ) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    call = message.content[-1]
    assert isinstance(call, ToolUseBlock)
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 10
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


async def test_the_conversation_continues_after_a_tool(client: AsyncAnthropic) -> None:
    first = await client.messages.create(model=MODEL, max_tokens=200, messages=[ASK], tools=[TOOL])
    call = first.content[-1]
    assert isinstance(call, ToolUseBlock)
    result: MessageParam = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}],
    }
    answer: MessageParam = {"role": "assistant", "content": first.content}
    second = await client.messages.create(
        model=MODEL, max_tokens=200, messages=[ASK, answer, result], tools=[TOOL]
    )
    assert [block.type for block in second.content] == ["text"]
    assert second.stop_reason == "end_turn"


@beta_async_tool
async def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


async def test_the_tool_runner_ends(client: AsyncAnthropic) -> None:
    """It wants the server to hold the conversation, and is refused."""
    ask: BetaMessageParam = {"role": "user", "content": "How is the weather in Oslo?"}
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=[ask], tools=[get_weather]
    )
    message = await runner.until_done()
    assert message.content[-1].to_dict()["text"] == "It is sunny in Oslo. Bye."


async def test_omitted_thinking_returns_to_the_model(client: AsyncAnthropic) -> None:
    prompts = []
    for display in ("omitted", "summarized"):
        thinking: Any = {"type": "adaptive", "display": display}
        async with client.messages.stream(
            model=MODEL, max_tokens=200, messages=[ASK], tools=[TOOL], thinking=thinking
        ) as stream:
            first = await stream.get_final_message()
        block, call = first.content[0], first.content[-1]
        assert isinstance(block, ThinkingBlock)
        assert bool(block.thinking) == (display == "summarized")
        assert isinstance(call, ToolUseBlock)
        answer: MessageParam = {"role": "assistant", "content": first.content}
        result: MessageParam = {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}],
        }
        counted = await client.messages.count_tokens(
            model=MODEL, messages=[ASK, answer, result], tools=[TOOL]
        )
        prompts.append((first.usage.output_tokens, counted.input_tokens))
    assert prompts[0] == prompts[1]


async def test_context_edits_are_reported(client: AsyncAnthropic) -> None:
    messages: list[Any] = [ASK]
    for number in range(4):
        use = {"type": "tool_use", "id": f"t{number}", "name": "get_weather", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "sunny " * 50}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    edits: Any = {
        "edits": [
            {"type": "clear_thinking_20251015", "keep": "all"},
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 3},
                "keep": {"type": "tool_uses", "value": 1},
            },
        ]
    }
    counted = await client.beta.messages.count_tokens(
        model=MODEL, messages=messages, context_management=edits
    )
    async with client.beta.messages.stream(
        model=MODEL, max_tokens=9, messages=messages, context_management=edits
    ) as stream:
        made = await stream.get_final_message()
    assert counted.context_management is not None
    assert made.context_management is not None
    (applied,) = made.context_management.applied_edits
    saved = counted.context_management.original_input_tokens - counted.input_tokens
    assert applied.type == "clear_tool_uses_20250919"
    assert (applied.cleared_tool_uses, applied.cleared_input_tokens) == (3, saved)
    usage = made.usage
    read = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    assert usage.input_tokens + read == counted.input_tokens


async def test_counts_agree_with_usage(client: AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(model=MODEL, messages=[ASK], tools=[TOOL])
    made = await client.messages.create(model=MODEL, max_tokens=5, messages=[ASK], tools=[TOOL])
    usage = made.usage
    cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    assert usage.input_tokens + cached == counted.input_tokens
    assert made.stop_reason == "max_tokens"


async def test_content_as_text_or_as_blocks_counts_the_same(client: AsyncAnthropic) -> None:
    blocks: MessageParam = {
        "role": "user",
        "content": [
            {
                "type": "text",
                "text": "How is the weather in Oslo?",
                "cache_control": {"type": "ephemeral"},
            }
        ],
    }
    as_text = await client.messages.count_tokens(model=MODEL, messages=[ASK])
    as_blocks = await client.messages.count_tokens(model=MODEL, messages=[blocks])
    assert as_text.input_tokens == as_blocks.input_tokens


async def test_marked_prompts_are_retained_and_read_from_the_cache(client: AsyncAnthropic) -> None:
    text = f"You are agent {secrets.token_hex(8)}. " + "Look at the weather of every town. " * 40
    system: TextBlockParam = {
        "type": "text",
        "text": text,
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
    }
    question: TextBlockParam = {
        "type": "text",
        "text": "How is the weather in Oslo?",
        "cache_control": {"type": "ephemeral"},
    }
    asked: MessageParam = {"role": "user", "content": [question]}
    shown = {"nvext": {"extra_fields": ["cache"]}}
    first = await client.messages.create(
        model=MODEL, max_tokens=200, system=[system], messages=[asked], extra_body=shown
    )
    told = first.to_dict()["nvext"]["cache"]["retention"]  # type: ignore[index]
    assert [(entry["duration_s"], entry["outcome"]) for entry in told] == [
        (300, "honoured"),
        (3600, "honoured"),
    ]
    assert first.usage.cache_read_input_tokens == 0
    written = first.usage.cache_creation_input_tokens or 0
    assert written > 200
    created = first.usage.cache_creation
    assert created is not None
    assert 200 < created.ephemeral_1h_input_tokens <= written
    assert created.ephemeral_5m_input_tokens == written - created.ephemeral_1h_input_tokens
    answer: MessageParam = {"role": "assistant", "content": first.content}
    second = await client.messages.create(
        model=MODEL, max_tokens=200, system=[system], messages=[asked, answer, ASK]
    )
    assert (second.usage.cache_read_input_tokens or 0) >= written


async def test_the_billing_header_is_not_part_of_the_prompt(client: AsyncAnthropic) -> None:
    plain = await client.messages.count_tokens(
        model=MODEL, messages=[ASK], system=[{"type": "text", "text": "Be kind."}]
    )
    billed = await client.messages.count_tokens(
        model=MODEL,
        messages=[ASK],
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"},
            {"type": "text", "text": "Be kind."},
        ],
    )
    assert plain.input_tokens == billed.input_tokens


async def test_a_tool_can_be_required(client: AsyncAnthropic) -> None:
    made = await client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": "Anything"}],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
    )
    assert [block.type for block in made.content] == ["tool_use"]
    assert made.stop_reason == "tool_use"


async def test_a_stop_sequence_is_named(client: AsyncAnthropic) -> None:
    made = await client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[ASK, {"role": "assistant", "content": "."}, ASK],
        stop_sequences=["sunny"],
    )
    assert made.stop_reason == "stop_sequence"
    assert made.stop_sequence == "sunny"


async def test_errors_are_the_sdk_s_own(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="nope", max_tokens=5, messages=[ASK])
    with pytest.raises(anthropic.BadRequestError, match="exceed context limit"):
        await client.messages.create(model=MODEL, max_tokens=900_000, messages=[ASK], timeout=60)
    wrong: TextBlockParam = {
        "type": "text",
        "text": "Hello",
        "cache_control": {"type": "ephemeral", "ttl": "soon"},  # type: ignore[typeddict-item]
    }
    with pytest.raises(anthropic.BadRequestError, match=r"cache_control\.ttl"):
        await client.messages.create(
            model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [wrong]}]
        )
    long: MessageParam = {"role": "user", "content": "word " * 300_000}
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await client.messages.create(model=MODEL, max_tokens=5, messages=[long])


async def test_the_sdk_reads_the_request_id(client: AsyncAnthropic) -> None:
    made = await client.messages.create(model=MODEL, max_tokens=5, messages=[ASK])
    assert made._request_id == made.id
    async with client.messages.stream(model=MODEL, max_tokens=5, messages=[ASK]) as stream:
        message = await stream.get_final_message()
        assert stream.request_id == message.id
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="other", max_tokens=5, messages=[ASK])
    assert (missing.value.request_id or "").startswith("msg_")
    assert missing.value.body["request_id"] == missing.value.request_id  # type: ignore[index]


async def test_a_compacted_conversation_goes_on_with_its_summary(client: AsyncAnthropic) -> None:
    said = "Look at one more town, please. " * 60
    messages: list[BetaMessageParam] = [{"role": "user", "content": said}]
    edit: BetaCompact20260112EditParam = {
        "type": "compact_20260112",
        "trigger": {"type": "input_tokens", "value": 200},
    }
    edits: BetaContextManagementConfigParam = {"edits": [edit]}
    async with client.beta.messages.stream(
        model=MODEL, max_tokens=90, messages=messages, context_management=edits
    ) as stream:
        made = await stream.get_final_message()
    first, second = made.content
    assert (first.type, first.type == "compaction" and first.content) == (
        "compaction",
        "The user counts towns.",
    )
    assert (second.type, made.stop_reason) == ("text", "end_turn")
    assert made.usage.iterations is not None
    assert [each.type for each in made.usage.iterations] == ["compaction", "message"]
    answer: BetaMessageParam = {"role": "assistant", "content": made.content}
    messages += [answer, {"role": "user", "content": "How many?"}]
    counted = await client.beta.messages.count_tokens(
        model=MODEL, messages=messages, context_management=edits
    )
    again = await client.beta.messages.create(
        model=MODEL, max_tokens=90, messages=messages, context_management=edits
    )
    usage = again.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached < 100
    assert [block.type for block in again.content] == ["text"]


@pytest.mark.parametrize("budget", [1, 4])
async def test_thinking_ends_at_its_budget(client: AsyncAnthropic, budget: int) -> None:
    made = await client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[ASK],
        tools=[TOOL],
        thinking={"type": "enabled", "budget_tokens": budget},
    )
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use"]
    assert made.usage.output_tokens_details is not None
    assert made.usage.output_tokens_details.thinking_tokens == budget
