"""Strands Agents: strands_agent.py chat BASE_URL."""

import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def weather(city: str, note: str, days: int = 1) -> str:
    """Forecast the weather of a city, with a note."""
    return f"It rains in {city} for {days} days."


def main(_: str, base: str) -> None:
    client = {"base_url": f"{base}/v1", "api_key": "none"}
    model = OpenAIModel(client_args=client, model_id="kvmesh-demo")
    system = "You are a careful forecaster. " * 40
    agent = Agent(model, tools=[weather], system_prompt=system, callback_handler=None)
    for prompt in ("How is the weather?", "And tomorrow?"):
        print(agent(prompt))


main(*sys.argv[1:])
