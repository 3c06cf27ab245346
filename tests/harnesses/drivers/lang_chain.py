"""langchain: lang_chain.py (chat | responses | anthropic) BASE_URL."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: str, note: str, days: int = 1) -> str:
    """Forecast the weather of a city, with a note."""
    return f"It rains in {city} for {days} days."


def model(kind: str, base: str) -> ChatOpenAI | ChatAnthropic:
    if kind == "anthropic":
        return ChatAnthropic(model="kvmesh-demo", base_url=base, api_key="none", max_tokens=8192)
    responses = {"use_responses_api": True, "store": False} if kind == "responses" else {}
    if responses:
        responses["include"] = ["reasoning.encrypted_content"]
    return ChatOpenAI(model="kvmesh-demo", base_url=f"{base}/v1", api_key="none", **responses)


def main(kind: str, base: str) -> None:
    system = "You are a careful forecaster. " * 40
    agent = create_agent(model(kind, base), [weather], system_prompt=system)
    messages = []
    for prompt in ("How is the weather?", "And tomorrow?"):
        messages.append({"role": "user", "content": prompt})
        messages = agent.invoke({"messages": messages})["messages"]
        print(messages[-1].text)


main(*sys.argv[1:])
