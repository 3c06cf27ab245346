"""openai-agents: agents_sdk.py (chat | chat-replay | responses) BASE_URL."""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

MODEL = "kvmesh-demo"


@function_tool
def weather(city: str, note: str, days: int = 1) -> str:
    """Forecast the weather of a city.

    Args:
        city: The name of the city.
        note: A note.
        days: For how many days.
    """
    return f"It rains in {city} for {days} days."


async def main(kind: str, base: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{base}/v1", api_key="none")
    model = {
        "chat": lambda: OpenAIChatCompletionsModel(MODEL, client),
        "chat-replay": lambda: OpenAIChatCompletionsModel(
            MODEL, client, should_replay_reasoning_content=lambda _: True
        ),
        "responses": lambda: OpenAIResponsesModel(MODEL, client),
    }[kind]()
    agent = Agent(
        name="Forecaster",
        instructions="You are a careful forecaster. " * 40,
        model=model,
        model_settings=ModelSettings(include_usage=True),
        tools=[weather],
    )
    items = []
    for prompt in ("How is the weather?", "And tomorrow?"):
        items.append({"role": "user", "content": prompt})
        result = Runner.run_streamed(agent, items)
        async for _ in result.stream_events():
            pass
        items = result.to_input_list()
        print(result.final_output)


asyncio.run(main(*sys.argv[1:]))
