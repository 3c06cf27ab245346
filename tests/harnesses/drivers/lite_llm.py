"""LiteLLM: lite_llm.py (openai | hosted_vllm | anthropic) BASE_URL."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import contacts another server
import litellm

litellm.suppress_debug_info = True  # else it prints hints between the answers
WEATHER = {
    "name": "weather",
    "description": "Forecast the weather of a city, with a note.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "note": {"type": "string"},
            "days": {"type": "integer"},
        },
        "required": ["city", "note"],
    },
}


def main(provider: str, base: str) -> None:
    model = {
        "model": f"{provider}/kvmesh-demo",
        "api_base": base if provider == "anthropic" else f"{base}/v1",
        "api_key": "none",
        "tools": [{"type": "function", "function": WEATHER}],
        "stream": True,
    }
    messages = [{"role": "system", "content": "You are a careful forecaster. " * 40}]
    for prompt in ("How is the weather?", "And tomorrow?"):
        messages.append({"role": "user", "content": prompt})
        while True:
            chunks = list(litellm.completion(messages=messages, **model))
            answer = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
                messages.append(result)
        print(answer.content)


main(*sys.argv[1:])
