"""A chat of two turns with the openai SDK (`pip install openai`), on a mesh at OPENAI_BASE_URL."""

import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),  # a mesh of `kvmesh up` needs no key
    # The session's name: the mesh keeps what its next turn needs, `kvmesh explain trace` shows it.
    default_headers={"x-kvmesh-session-id": "example"},
)
model = client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You review pull requests. " * 40},
]
for question in ("Is this function correct?", "And is it tested?"):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
    text = answer.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    cached = details.cached_tokens if details is not None else 0
    print(f"{question} {answer.usage.prompt_tokens} prompt tokens, {cached} of them cached")
