"""Requests and templates for tests of dialects."""

import datetime
import json
from pathlib import Path
from typing import Any

from kvmesh.bus.messages import Sampling
from kvmesh.demo import model_dir
from kvmesh.frontend.conversation import (
    Block,
    GenerateRequest,
    Message,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from kvmesh.frontend.dialects.templates.chat_template import ChatTemplate

TODAY = datetime.date(2026, 11, 21)
TEMPLATES = Path(__file__).parent / "templates"
CONFIG = json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}).encode()


def template(name: str) -> ChatTemplate:
    """A template of the test data, or that of the demo model."""
    if name == "demo":
        return ChatTemplate({f.name: f.read_bytes() for f in model_dir().iterdir()})
    source = (TEMPLATES / f"{name}.jinja").read_bytes()
    return ChatTemplate({"chat_template.jinja": source, "tokenizer_config.json": CONFIG})


def from_source(source: str) -> ChatTemplate:
    return ChatTemplate({"chat_template.jinja": source.encode()})


def request(*messages: Message, **fields: Any) -> GenerateRequest:
    sampling = Sampling(max_tokens=0)
    return GenerateRequest(id="r", model="m", sampling=sampling, messages=list(messages), **fields)


def system(*texts: str) -> Message:
    return Message(role="system", blocks=[Text(text) for text in texts])


def user(*texts: str) -> Message:
    return Message(role="user", blocks=[Text(text) for text in texts])


def assistant(*blocks: Block | str) -> Message:
    return Message(role="assistant", blocks=[Text(b) if isinstance(b, str) else b for b in blocks])


def call(name: str, call_id: str = "c1", **arguments: Any) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=json.dumps(arguments))


def result(text: str, call_id: str = "c1", references: list[str] | None = None) -> Message:
    found = ToolResult(call_id=call_id, content=[Text(text)], references=references or [])
    return Message(role="tool", blocks=[found])


def tool(name: str, deferred: bool = False, **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties}
    return Tool(name=name, description=f"Does {name}.", parameters=parameters, deferred=deferred)
