"""The four generating APIs in one form: request bodies, and the content of their responses."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from support.frontend import MODEL, Client, events

Json = dict[str, Any]


@dataclass
class Content:
    """Content of a response. `finish` is the API's own reason; `cached` counts prompt tokens."""

    thinking: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    finish: str | None = None
    prompt: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0
    nvext: Json | None = None
    id: str = field(default="", compare=False)
    call_ids: list[str] = field(default_factory=list, compare=False)

    def decode_calls(self) -> "Content":
        """Decode the arguments of calls from JSON."""
        self.calls = [
            (name, json.loads(arguments or "{}") if isinstance(arguments, str) else arguments)
            for name, arguments in self.calls
        ]
        return self


@dataclass(frozen=True)
class Api:
    """One API: `body` makes a request of a user's text, `limit` names its bound of tokens."""

    name: str
    path: str
    limit: str
    prompt: Callable[[str], Json]
    whole: Callable[[Json], Content]
    streamed: Callable[[list[Json]], Content]

    def body(self, text: str, tokens: int | None = None, /, **fields: Any) -> Json:
        base: Json = {"model": MODEL, **self.prompt(text)}
        return base | ({self.limit: tokens} if tokens else {}) | fields

    async def send(self, client: Client, body: Json, **headers: str) -> Content:
        """Send a request and read its response; a stream if `body` has `stream`."""
        if body.get("stream") and self.name in ("chat", "completions"):
            body = {**body, "stream_options": {"include_usage": True}}
        response = await client.stream(self.path, body, **headers)
        assert response.status == 200, await response.text()
        if body.get("stream"):
            found = [event for event in await events(response) if event != "[DONE]"]
            first, content = found[0], self.streamed(found)
        else:
            first = msgspec.json.decode(await response.read())
            content = self.whole(first)
        content.id = (first.get("message") or first.get("response") or first)["id"]
        return content.decode_calls()


def _openai_usage(content: Content, usage: Json) -> None:
    content.prompt, content.output = usage["prompt_tokens"], usage["completion_tokens"]
    content.cached = usage["prompt_tokens_details"]["cached_tokens"]
    content.reasoning = usage["completion_tokens_details"]["reasoning_tokens"]


def _chat_whole(answer: Json) -> Content:
    (choice,) = answer["choices"]
    message = choice["message"]
    content = Content(message.get("reasoning_content") or "", message["content"] or "")
    functions = [call["function"] for call in message.get("tool_calls", [])]
    content.call_ids = [call["id"] for call in message.get("tool_calls", [])]
    content.calls = [(function["name"], function["arguments"]) for function in functions]
    content.finish, content.nvext = choice["finish_reason"], answer.get("nvext")
    _openai_usage(content, answer["usage"])
    return content


def _chat_streamed(chunks: list[Json]) -> Content:
    content = Content()
    calls: list[list[str]] = []
    for chunk in chunks:
        if chunk.get("usage"):
            _openai_usage(content, chunk["usage"])
        content.nvext = chunk.get("nvext", content.nvext)
        for choice in chunk["choices"]:
            content.finish = choice["finish_reason"] or content.finish
            delta = choice["delta"]
            content.thinking += delta.get("reasoning_content") or ""
            content.text += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(calls):
                    calls.append([call["function"]["name"], ""])
                    content.call_ids.append(call["id"])
                calls[call["index"]][1] += call["function"].get("arguments", "")
    content.calls = [(name, arguments) for name, arguments in calls]
    return content


def _completion_whole(answer: Json) -> Content:
    (choice,) = answer["choices"]
    content = Content(text=choice["text"], finish=choice["finish_reason"])
    content.nvext = answer.get("nvext")
    _openai_usage(content, answer["usage"])
    return content


def _completion_streamed(chunks: list[Json]) -> Content:
    content = Content()
    for chunk in chunks:
        if chunk.get("usage"):
            _openai_usage(content, chunk["usage"])
        content.nvext = chunk.get("nvext", content.nvext)
        for choice in chunk["choices"]:
            content.finish = choice["finish_reason"] or content.finish
            content.text += choice["text"]
    return content


def _messages_usage(content: Content, usage: Json) -> None:
    inputs = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    content.prompt = sum(usage[name] for name in inputs)
    content.cached, content.output = usage["cache_read_input_tokens"], usage["output_tokens"]
    content.reasoning = usage["output_tokens_details"]["thinking_tokens"]


def _messages_whole(answer: Json) -> Content:
    content = Content(finish=answer["stop_reason"], nvext=answer.get("nvext"))
    for block in answer["content"]:
        if block["type"] == "thinking":
            content.thinking += block["thinking"]
        elif block["type"] == "text":
            content.text += block["text"]
        else:
            content.calls.append((block["name"], block["input"]))
            content.call_ids.append(block["id"])
    _messages_usage(content, answer["usage"])
    return content


def _messages_streamed(found: list[Json]) -> Content:
    blocks: list[Json] = []
    last: Json = {}
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"], partial=""))
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            kind = delta["type"].removesuffix("_delta")
            name = {"input_json": "partial"}.get(kind, kind)
            block[name] += delta["partial_json" if name == "partial" else name]
        elif event["type"] == "message_delta":
            last = event
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["partial"] or "{}")
    whole = {"content": blocks, "stop_reason": last["delta"]["stop_reason"], "usage": last["usage"]}
    return _messages_whole(whole | ({"nvext": last["nvext"]} if "nvext" in last else {}))


def _responses_usage(content: Content, usage: Json) -> None:
    content.prompt, content.output = usage["input_tokens"], usage["output_tokens"]
    content.cached = usage["input_tokens_details"]["cached_tokens"]
    content.reasoning = usage["output_tokens_details"]["reasoning_tokens"]


def _responses_whole(answer: Json) -> Content:
    content = Content(finish=answer["status"], nvext=answer.get("nvext"))
    for item in answer["output"]:
        if item["type"] == "function_call":
            content.calls.append((item["name"], item["arguments"]))
            content.call_ids.append(item["call_id"])
        elif item["type"] == "reasoning":
            content.thinking += "".join(part["text"] for part in item["content"])
        else:
            content.text += "".join(part["text"] for part in item["content"])
    _responses_usage(content, answer["usage"])
    return content


def _responses_streamed(found: list[Json]) -> Content:
    """The content by the deltas, which the final response object must repeat."""
    last = _responses_whole(found[-1]["response"])
    content = Content(finish=last.finish, nvext=last.nvext)
    calls: dict[int, list[str]] = {}
    for event in found:
        kind = event["type"]
        if kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            calls[event["output_index"]] = [event["item"]["name"], ""]
        elif kind == "response.function_call_arguments.delta":
            calls[event["output_index"]][1] += event["delta"]
        elif kind == "response.reasoning_text.delta":
            content.thinking += event["delta"]
        elif kind == "response.output_text.delta":
            content.text += event["delta"]
    content.calls = [(name, arguments) for name, arguments in calls.values()]
    content.call_ids = last.call_ids
    _responses_usage(content, found[-1]["response"]["usage"])
    assert content == last
    return content


def _user(text: str) -> Json:
    return {"messages": [{"role": "user", "content": text}]}


CHAT = Api("chat", "/v1/chat/completions", "max_tokens", _user, _chat_whole, _chat_streamed)
COMPLETIONS = Api(
    "completions",
    "/v1/completions",
    "max_tokens",
    lambda text: {"prompt": text},
    _completion_whole,
    _completion_streamed,
)
MESSAGES = Api(
    "messages",
    "/v1/messages",
    "max_tokens",
    _user,
    _messages_whole,
    _messages_streamed,
)
RESPONSES = Api(
    "responses",
    "/v1/responses",
    "max_output_tokens",
    lambda text: {"input": text, "store": False},
    _responses_whole,
    _responses_streamed,
)
APIS = [CHAT, COMPLETIONS, MESSAGES, RESPONSES]
every_api = pytest.mark.parametrize("api", APIS, ids=[api.name for api in APIS])
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
