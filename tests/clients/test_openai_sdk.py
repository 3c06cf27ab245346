"""The OpenAI SDK on chat completions, completions and responses."""

import json
import re
import secrets
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, pydantic_function_tool
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionMessageParam,
    ChatCompletionToolChoiceOptionParam,
    ChatCompletionToolParam,
)
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCall,
    ResponseFunctionToolCallParam,
    ResponseReasoningItem,
)
from openai.types.responses.response_input_item_param import FunctionCallOutput, ItemReference
from pydantic import BaseModel
from support.frontend import MODEL
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells it.", "parameters": SCHEMA},
}
TOOL: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells it.",
    "parameters": SCHEMA,
    "strict": False,
}
ASK = "How is the weather in Oslo?"


class Person(BaseModel):
    name: str
    age: int
    tags: list[str]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        yield client


async def test_chat_calls_a_tool_and_continues(client: AsyncOpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": ASK}]
    first = await client.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL])
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is not None
    assert choice.message.content.strip() == "I look it up."
    assert "looked up" in choice.message.to_dict()["reasoning_content"]  # type: ignore[operator]
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')
    messages.append(choice.message.to_dict())  # type: ignore[arg-type]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    second = await client.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL])
    assert second.choices[0].message.content == "It is sunny in Oslo. Bye."
    assert second.choices[0].finish_reason == "stop"
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


async def test_chat_streams_thinking_text_and_calls(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": ASK}], tools=[CHAT_TOOL]
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.arguments == '{"city": "Oslo"}'
    assert final.choices[0].finish_reason == "tool_calls"
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert len(done) == 1


async def test_chat_parses_into_a_model(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Someone"}], response_format=Person
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


async def test_vllms_constraints_hold(client: AsyncOpenAI) -> None:
    chosen = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Yes or no?"}],
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert chosen.choices[0].message.content in ("yes", "no")
    coded = await client.completions.create(
        model=MODEL, prompt="Code:", max_tokens=64, extra_body={"guided_regex": "[A-Z]{3}-[0-9]{2}"}
    )
    assert re.fullmatch("[A-Z]{3}-[0-9]{2}", coded.choices[0].text)
    response = await client.responses.create(
        model=MODEL, input="Code?", extra_body={"structured_outputs": {"regex": "[a-f]{4}"}}
    )
    assert re.fullmatch("[a-f]{4}", response.output_text)


class Booking(BaseModel):
    city: str
    days: int


async def test_chat_parses_strict_calls_of_a_free_choice(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Book a room"}],
        tools=[pydantic_function_tool(Booking, name="book")],
        tool_choice="auto",
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == Booking(city="Oslo", days=2)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_chat_calls_the_required_tool(
    client: AsyncOpenAI, choice: ChatCompletionToolChoiceOptionParam
) -> None:
    async with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        tools=[CHAT_TOOL],
        tool_choice=choice,
    ) as stream:
        answer = await stream.get_final_completion()
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.name == "get_weather"
    assert isinstance(json.loads(calls[0].function.arguments)["city"], str)


async def test_chat_returns_several_choices_with_probabilities(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        n=2,
        logprobs=True,
        top_logprobs=2,
        max_tokens=5,
        seed=1,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 5
        text = "".join(token.token for token in choice.logprobs.content)
        assert text == choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10


async def test_completions_answer_each_prompt(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=["One", "Two"], max_tokens=4, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("One")
    assert answer.choices[1].text.startswith("Two")
    tokens = await client.completions.create(model=MODEL, prompt=[100, 200, 300], max_tokens=4)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 3
    chunks = await client.completions.create(
        model=MODEL, prompt="One", max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    seen = [chunk async for chunk in chunks]
    assert "".join(c.choices[0].text for c in seen if c.choices)
    assert seen[-1].usage is not None


async def test_responses_call_a_tool_and_continue(client: AsyncOpenAI) -> None:
    async with client.responses.stream(model=MODEL, input=ASK, tools=[TOOL]) as stream:
        kinds = [event.type async for event in stream]
        first = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call = first.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Oslo"}')
    second = await client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        tools=[TOOL],
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
    )
    assert second.output_text == "It is sunny in Oslo. Bye."
    assert second.status == "completed"


async def test_responses_show_thinking_as_a_summary_where_asked(client: AsyncOpenAI) -> None:
    async with client.responses.stream(
        model=MODEL, input=ASK, tools=[TOOL], reasoning={"summary": "auto"}
    ) as stream:
        kinds = {event.type async for event in stream}
        response = await stream.get_final_response()
    reasoning = response.output[0]
    assert isinstance(reasoning, ResponseReasoningItem)
    assert [part.text for part in reasoning.summary] == ["The weather has to be looked up."]
    assert "response.reasoning_summary_part.added" in kinds
    assert "response.reasoning_text.delta" not in kinds


async def test_a_replayed_history_counts_like_a_stored_one(client: AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input=ASK, tools=[TOOL], store=False)
    call = next(item for item in first.output if item.type == "function_call")
    history = [{"role": "user", "content": ASK}, *(item.to_dict() for item in first.output)]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = await client.responses.create(
        model=MODEL,
        tools=[TOOL],
        input=[*history, output],  # type: ignore[list-item]
        store=False,
    )
    assert second.output_text == "It is sunny in Oslo. Bye."
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)


async def test_a_tool_loop_refers_to_stored_items(client: AsyncOpenAI) -> None:
    user: EasyInputMessageParam = {"role": "user", "content": ASK}
    first = await client.responses.create(model=MODEL, input=[user], tools=[TOOL])
    call = first.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    items: list[ItemReference] = [
        {"type": "item_reference", "id": item.id} for item in first.output[:-1] if item.id
    ]
    result: FunctionCallOutput = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "sunny",
    }
    made: ResponseFunctionToolCallParam = {
        "type": "function_call",
        "id": call.id or "",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
    }
    second = await client.responses.create(
        model=MODEL, input=[user, *items, made, result], tools=[TOOL]
    )
    assert second.output_text == "It is sunny in Oslo. Bye."
    same = await client.responses.create(
        model=MODEL, input=[result], tools=[TOOL], previous_response_id=first.id
    )
    assert second.usage is not None
    assert same.usage is not None
    assert second.usage.input_tokens == same.usage.input_tokens
    await client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=items[0]["id"]):
        await client.responses.create(model=MODEL, input=[user, *items, made, result])


async def test_responses_are_stored_until_deleted(client: AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    assert made.status == "incomplete"
    read = await client.responses.retrieve(made.id)
    assert read.output_text == made.output_text
    items = await client.responses.input_items.list(made.id)
    assert len(items.data) == 1
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as error:
        await client.responses.create(model=MODEL, input="x", previous_response_id=made.id)
    assert error.value.code == "previous_response_not_found"


async def test_responses_parse_into_a_model(client: AsyncOpenAI) -> None:
    answer = await client.responses.parse(model=MODEL, input="Someone", text_format=Person)
    assert isinstance(answer.output_parsed, Person)


async def test_prompts_are_retained_as_long_as_the_caller_asks(client: AsyncOpenAI) -> None:
    text = f"You are agent {secrets.token_hex(8)}. " + "Look at the weather of every town. " * 40
    shown = {"nvext": {"extra_fields": ["cache"]}}
    made = await client.responses.create(
        model=MODEL, input=text, prompt_cache_retention="24h", store=False, extra_body=shown
    )

    async def cached() -> ChatCompletion:
        """Send the prompt again, once the router knows its rank."""
        again = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": text}],
            prompt_cache_options={"ttl": "30m"},
            extra_body=shown,
        )
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 200
        return again

    again = await eventually(cached)
    kept = [answer.to_dict()["nvext"]["cache"]["retention"] for answer in (made, again)]  # type: ignore[index]
    assert [[entry["duration_s"] for entry in told] for told in kept] == [[86400], [1800]]
    assert {entry["outcome"] for told in kept for entry in told} == {"honoured"}
    assert made.usage is not None
    assert made.usage.input_tokens_details.cached_tokens == 0


async def test_input_tokens_are_exact(client: AsyncOpenAI) -> None:
    counted = await client.responses.input_tokens.count(model=MODEL, input="Hello there")
    answer = await client.responses.create(model=MODEL, input="Hello there", max_output_tokens=4)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


async def test_errors_are_the_sdk_s_own(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.create(model="nope", input="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        await client.responses.create(model=MODEL, input="x", max_output_tokens=10**6)
    assert long.value.code == "context_length_exceeded"


async def test_the_sdk_reads_the_request_id(client: AsyncOpenAI) -> None:
    ask: ChatCompletionMessageParam = {"role": "user", "content": "Hello"}
    made = await client.chat.completions.create(model=MODEL, messages=[ask], max_tokens=5)
    assert made._request_id == made.id
    response = await client.responses.create(model=MODEL, input="Hello", max_output_tokens=5)
    assert response._request_id == response.id
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=[ask])
    assert (missing.value.request_id or "").startswith("chatcmpl-")
