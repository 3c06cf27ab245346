"""The openai-agents SDK: a whole tool loop, on either of OpenAI's APIs."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from support.frontend import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")
set_tracing_disabled(True)


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


@pytest_asyncio.fixture(params=["responses", "chat"], loop_scope="session")
async def model(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Model]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        if request.param == "chat":
            yield OpenAIChatCompletionsModel(MODEL, client)
        else:
            yield OpenAIResponsesModel(MODEL, client)


async def test_an_agent_calls_its_tool_and_answers(model: Model) -> None:
    agent = Agent(name="a", instructions="Help.", model=model, tools=[get_weather])
    result = await Runner.run(agent, "How is the weather in Oslo?")
    assert result.final_output == "It is sunny in Oslo. Bye."


async def test_an_agent_streams_its_loop(model: Model) -> None:
    agent = Agent(name="a", instructions="Help.", model=model, tools=[get_weather])
    result = Runner.run_streamed(agent, "How is the weather in Oslo?")
    names = [e.name async for e in result.stream_events() if e.type == "run_item_stream_event"]
    assert "tool_called" in names
    assert "tool_output" in names
    assert result.final_output == "It is sunny in Oslo. Bye."


async def test_a_session_is_a_conversation_of_the_mesh(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        agent = Agent(name="a", model=OpenAIResponsesModel(MODEL, client), tools=[get_weather])
        session = OpenAIConversationsSession(openai_client=client)
        result = await Runner.run(agent, "How is the weather in Oslo?", session=session)
        assert result.final_output == "It is sunny in Oslo. Bye."
        items = await session.get_items()
        kinds = [str(item["type"]) for item in items if "type" in item]
        assert [kind for kind in kinds if kind != "reasoning"] == [
            *("message", "message"),
            *("function_call", "function_call_output"),
            "message",
        ]
        assert await session.pop_item() == items[-1]
        assert await session.get_items() == items[:-1]
        await session.clear_session()


class Forecast(BaseModel):
    city: str
    days: list[int]


async def test_a_schema_for_the_answer_leaves_the_tools_callable(model: Model) -> None:
    """Unscripted: the mock follows the constraint, which allows calls and the schema."""
    calls = 0
    for number in range(6):
        agent = Agent(name="a", model=model, tools=[get_weather], output_type=Forecast)
        result = await Runner.run(agent, f"Plan {number} trips.", max_turns=30)
        assert isinstance(result.final_output, Forecast)
        calls += sum(item.type == "tool_call_item" for item in result.new_items)
    assert calls
