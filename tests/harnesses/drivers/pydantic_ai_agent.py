"""pydantic-ai: pydantic_ai_agent.py (chat | responses | anthropic) BASE_URL."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def weather(city: str, note: str, days: int = 1) -> str:
    """Forecast the weather of a city, with a note."""
    return f"It rains in {city} for {days} days."


async def main(kind: str, base: str) -> None:
    openai = OpenAIProvider(base_url=f"{base}/v1", api_key="none")
    model = {
        "chat": lambda: OpenAIChatModel("kvmesh-demo", provider=openai),
        "responses": lambda: OpenAIResponsesModel("kvmesh-demo", provider=openai),
        "anthropic": lambda: AnthropicModel(
            "kvmesh-demo", provider=AnthropicProvider(base_url=base, api_key="none")
        ),
    }[kind]()
    system = "You are a careful forecaster. " * 40
    agent = Agent(model, tools=[weather], instructions=system)
    history = None
    for prompt in ("How is the weather?", "And tomorrow?"):
        result = await agent.run(prompt, message_history=history)
        history = result.all_messages()
        print(result.output)


asyncio.run(main(*sys.argv[1:]))
