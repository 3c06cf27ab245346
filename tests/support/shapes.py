"""Conversations in the request shapes of coding agents, each based on the agent's own description.

A shape has a path, headers, and the body of its next request. It receives the events of a response
as its client does, and adds a result for every tool call. Fields that vary between the requests of
a client's conversation vary here as well.
"""

import copy
import json
import random
import secrets
from typing import Any, Protocol

Event = dict[str, Any]
Json = dict[str, Any]
MODEL = "kvmesh-demo"
RESULT = "It is sunny in Oslo."
CITY: Json = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}},
    "required": ["city"],
}
MANUAL = "Work with care, and say what you did. " * 40


class Shape(Protocol):
    """One conversation of one client."""

    path: str
    headers: dict[str, str]

    def body(self) -> Json: ...

    def receive(self, events: list[Event]) -> None: ...

    def add_user_message(self, text: str) -> None: ...


class ClaudeCode:
    """Messages; the breakpoint and the billing block change, tools are loaded later."""

    path = "/v1/messages?beta=true"

    def __init__(self, session: str, agent: str | None = None) -> None:
        self.headers = {"anthropic-beta": "a,b,c", "X-Claude-Code-Session-Id": session}
        if agent is not None:
            self.headers["x-claude-code-agent-id"] = agent
        self._session = session
        self._messages: list[Json] = []
        self._loaded: list[Json] = []

    def add_user_message(self, text: str) -> None:
        reminder = {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>\n"}
        content = [reminder, {"type": "text", "text": text}]
        self._messages.append({"role": "user", "content": content})
        if len(self._messages) == 1:
            environment = {"type": "text", "text": "# Environment\nA machine.\n"}
            self._messages.append({"role": "system", "content": [environment]})

    def change_tools(self, added: str, removed: str) -> None:
        """Add the tools of one server and remove another's in mid-conversation."""
        definition = {"type": "tool_definition", "definition": self._tool(added)}
        reference = {"type": "tool_reference", "name": removed}
        content = [
            {"type": "tool_removal", "tool": reference},
            {"type": "tool_addition", "tool": definition},
        ]
        self._messages.append({"role": "system", "content": content})

    def body(self) -> Json:
        mark = {"cache_control": {"type": "ephemeral"}}
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={secrets.token_hex(3)};"
        user_id = {"device_id": "d", "account_uuid": "", "session_id": self._session}
        return {
            "model": MODEL,
            "messages": self._marked(mark),
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are an agent.", **mark},
                {"type": "text", "text": MANUAL, **mark},
            ],
            "tools": [
                self._tool("Agent"),
                self._tool("get_weather"),
                *self._loaded,
                {**self._tool("Placeholder"), "defer_loading": True},
                self._tool("Write"),
            ],
            "metadata": {"user_id": json.dumps(user_id)},
            "max_tokens": 32000,
            "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": True,
        }

    def _tool(self, name: str) -> Json:
        return {"name": name, "description": f"Does {name}.", "input_schema": CITY}

    def _marked(self, mark: Json) -> list[Json]:
        """Mark the last block as the breakpoint; the former breakpoint becomes plain text."""
        messages = copy.deepcopy(self._messages)
        messages[-1]["content"][-1].update(mark)
        for message in messages[:-1]:
            if len(message["content"]) == 1 and message["content"][0]["type"] == "text":
                message["content"] = message["content"][0]["text"]
        return messages

    def receive(self, events: list[Event]) -> None:
        blocks = message_blocks(events)
        self._messages.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if calls:
            results = [self._result(call) for call in calls]
            self._messages.append({"role": "user", "content": results})

    def _result(self, call: Json) -> Json:
        content = RESULT if call["name"] == "get_weather" else self._load()
        return {
            "tool_use_id": call["id"],
            "type": "tool_result",
            "content": content,
            "is_error": False,
        }

    def _load(self) -> list[Json]:
        """Reply to a tool search with a reference, and add the tool to the others."""
        self._loaded.append({**self._tool("CronList"), "defer_loading": True})
        return [{"type": "tool_reference", "tool_name": "CronList"}]


class OpencodeMessages:
    """Messages as opencode sends them; marks are on the last two messages."""

    path = "/v1/messages"

    def __init__(self, session: str) -> None:
        self.headers = opencode_headers(session)
        self._messages: list[Json] = []

    def add_user_message(self, text: str) -> None:
        self._messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def body(self) -> Json:
        mark = {"cache_control": {"type": "ephemeral"}}
        messages = copy.deepcopy(self._messages)
        for message in messages[-2:]:
            message["content"][-1].update(mark)
        return {
            "model": MODEL,
            "max_tokens": 16384,
            "system": [{"type": "text", "text": MANUAL, **mark}],
            "messages": messages,
            "tools": [{"name": "get_weather", "description": "Tells it.", "input_schema": CITY}],
            "tool_choice": {"type": "auto"},
            "stream": True,
        }

    def receive(self, events: list[Event]) -> None:
        blocks = message_blocks(events)
        self._messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        if results:
            self._messages.append({"role": "user", "content": results})


class OpencodeChat:
    """Chat completions; the client serializes arguments in its own spelling."""

    path = "/v1/chat/completions"

    def __init__(self, session: str) -> None:
        self.headers = opencode_headers(session)
        self._messages: list[Json] = [{"role": "system", "content": MANUAL}]

    def add_user_message(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def body(self) -> Json:
        function = {"name": "get_weather", "description": "Tells it.", "parameters": CITY}
        return {
            "model": MODEL,
            "max_tokens": 16384,
            "messages": self._messages,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def receive(self, events: list[Event]) -> None:
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        message: Json = {"role": "assistant"}
        for key in ("content", "reasoning_content"):
            message[key] = "".join(delta.get(key) or "" for delta in deltas)
        calls = self._calls([call for delta in deltas for call in delta.get("tool_calls") or []])
        self._messages.append({**message, "tool_calls": calls} if calls else message)
        for call in calls:
            result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
            self._messages.append(result)

    def _calls(self, parts: list[Json]) -> list[Json]:
        calls: list[Json] = []
        for part in parts:
            if part.get("id"):
                function = {"name": part["function"]["name"], "arguments": ""}
                calls.append({"id": part["id"], "type": "function", "function": function})
            calls[-1]["function"]["arguments"] += part["function"].get("arguments") or ""
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        return calls


class OpencodeResponses:
    """Responses without ids or statuses; a system message, thinking only in sealed form."""

    path = "/v1/responses"

    def __init__(self, session: str) -> None:
        self.headers = opencode_headers(session)
        self._session = session
        self._input: list[Json] = [{"role": "system", "content": MANUAL}]

    def add_user_message(self, text: str) -> None:
        self._input.append({"role": "user", "content": [{"type": "input_text", "text": text}]})

    def body(self) -> Json:
        tool = {"name": "get_weather", "description": "Tells it.", "parameters": CITY}
        return {
            "model": MODEL,
            "input": self._input,
            "max_output_tokens": 16384,
            "store": False,
            "prompt_cache_key": self._session,
            "tools": [{"type": "function", **tool, "strict": False}],
            "tool_choice": "auto",
            "stream": True,
        }

    def receive(self, events: list[Event]) -> None:
        items = output_items(events)
        self._input += [self._without_ids(item) for item in items]
        self._input += [tool_output(item) for item in items if "call_id" in item]

    def _without_ids(self, item: Json) -> Json:
        if item["type"] == "message":
            text = "".join(part["text"] for part in item["content"])
            content = [{"type": "output_text", "text": text}]
            return {"role": "assistant", "content": content}
        if item["type"] == "reasoning":
            sealed = item["encrypted_content"]
            return {"type": "reasoning", "encrypted_content": sealed, "summary": []}
        kept = {key: item[key] for key in ("type", "call_id", "name")}
        arguments = json.dumps(json.loads(item["arguments"]), separators=(",", ":"))
        return {**kept, "arguments": arguments}


class Codex:
    """Responses; ids and metadata differ from one request to the next."""

    path = "/v1/responses"

    def __init__(self, session: str) -> None:
        turn = json.dumps({"session_id": session, "request_kind": "turn"})
        self.headers = {
            "session-id": session,
            "thread-id": session,
            "x-codex-turn-metadata": turn,
        }
        self._session = session
        self._input: list[Json] = [
            self._message("developer", MANUAL),
            self._message("developer", "## Skills", "## Permissions"),
            self._message("user", "<environment_context>here</environment_context>"),
        ]

    def _message(self, role: str, *texts: str) -> Json:
        content = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "role": role, "content": content}

    def add_user_message(self, text: str) -> None:
        self._input.append(self._message("user", text))

    def body(self) -> Json:
        metadata = [("session_id", self._session), ("turn_id", secrets.token_hex()), ("w", "0")]
        random.shuffle(metadata)
        return {
            "model": MODEL,
            "stream": True,
            "input": [{**item, "id": secrets.token_hex(8)} for item in self._input],
            "tools": self._tools(),
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": self._session,
            "client_metadata": dict(metadata),
        }

    def _tools(self) -> list[Json]:
        weather = {"name": "get_weather", "description": "Tells it.", "parameters": CITY}
        function = {"type": "function", **weather, "strict": False}
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
        patch = {"name": "apply_patch", "description": "Patches files.", "format": grammar}
        return [
            function,
            {"type": "custom", **patch},
            {"type": "namespace", "name": "sky", "description": "Above.", "tools": [function]},
            {"type": "web_search", "external_web_access": True},
            {"type": "of_tomorrow", "unheard": [1]},
        ]

    def receive(self, events: list[Event]) -> None:
        items = output_items(events)
        self._input += items
        self._input += [tool_output(item) for item in items if "call_id" in item]


def opencode_headers(session: str) -> dict[str, str]:
    return {"x-session-id": session, "x-session-affinity": session}


def output_items(events: list[Event]) -> list[Json]:
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


def tool_output(call: Json) -> Json:
    return {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": RESULT}


def message_blocks(events: list[Event]) -> list[Json]:
    """The content blocks of a stream of Messages events."""
    blocks: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "input": ""})
        elif event["type"] == "content_block_delta":
            _, (key, text) = event["delta"].items()
            blocks[-1]["input" if key == "partial_json" else key] += text
    for block in blocks:
        arguments = block.pop("input")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments or "{}")
    return blocks
