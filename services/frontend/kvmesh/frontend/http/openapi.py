"""OpenAPI description of this server, generated from the types that decode its bodies."""

import re
from functools import cached_property
from html import escape
from typing import Any, NamedTuple, get_args

import msgspec
from aiohttp import web

from kvmesh.frontend.apis.cache.body import (
    ClearBody,
    PinBody,
    PrefetchBody,
    ReleaseBody,
    UnpinBody,
)
from kvmesh.frontend.apis.cache.tool_events import ClaudeCodeHook, ToolBody
from kvmesh.frontend.apis.chat.body import ChatBody, ChatToolBody
from kvmesh.frontend.apis.completions import CompletionBody
from kvmesh.frontend.apis.content.parts import Part
from kvmesh.frontend.apis.messages.blocks import ContentBlock
from kvmesh.frontend.apis.messages.body import MessagesBody
from kvmesh.frontend.apis.messages.client_tools import MessagesToolBody
from kvmesh.frontend.apis.messages.context_management import EDIT_TYPES
from kvmesh.frontend.apis.pooling.embeddings import EmbeddingsBody
from kvmesh.frontend.apis.pooling.rerank import RerankBody, ScoreBody
from kvmesh.frontend.apis.responses.body import ResponsesBody
from kvmesh.frontend.apis.responses.conversations import (
    ConversationBody,
    ConversationItems,
    ConversationUpdate,
)
from kvmesh.frontend.apis.responses.tool_bodies import ResponsesToolBody
from kvmesh.frontend.apis.tokens import DetokenizeBody, TokenizeBody
from kvmesh.frontend.http.batches.endpoints import BatchBody, MessageBatchBody
from kvmesh.frontend.http.bodies import JSON
from kvmesh.frontend.http.dynamo.busy_threshold import BusyThresholdBody
from kvmesh.runtime.service import VERSION

_MODULES = re.compile(r"\b(?:kvmesh|typing|msgspec)[\w.]*\.")
_PARAMETERS = re.compile(r"{(\w+)}")
REF = "#/components/schemas/{name}"
FAULTS = {
    "400": "invalid request; `param` names the field",
    "401": "missing or invalid API key",
    "403": "the API key does not permit this",
    "404": "model, response, conversation, file, batch, pin, prefetch, session or path not found",
    "405": "the path has other methods, which `Allow` lists",
    "413": "the body is too large",
    "415": "a content coding that `Accept-Encoding` does not list, or a form without API keys",
    "429": "rate limit reached or overloaded; wait for `retry-after` seconds",
    "500": "internal server error",
    "503": "no worker or router is available",
    "504": "no worker became free in time",
    "529": "overloaded (Messages API); wait for `retry-after` seconds",
}


class EndpointDescription(NamedTuple):
    """One operation; `streams`: the response may be server-sent events."""

    method: str
    path: str
    about: str
    body: type[msgspec.Struct] | None = None
    streams: bool = False


_ENDPOINTS: list[tuple[Any, ...]] = [
    ("post", "/v1/chat/completions", "Chat completion (OpenAI)", ChatBody, True),
    ("post", "/v1/completions", "Text completion (OpenAI)", CompletionBody, True),
    ("post", "/v1/responses", "Response (OpenAI)", ResponsesBody, True),
    ("post", "/v1/responses/input_tokens", "Count a prompt's tokens", ResponsesBody),
    ("post", "/v1/responses/compact", "Summarize a conversation", ResponsesBody),
    ("get", "/v1/responses/{id}", "A stored response"),
    ("delete", "/v1/responses/{id}", "Delete a stored response"),
    ("post", "/v1/responses/{id}/cancel", "Cancel a background response"),
    ("get", "/v1/responses/{id}/input_items", "Input items of a stored response"),
    ("post", "/v1/conversations", "Create a conversation", ConversationBody),
    ("get", "/v1/conversations/{id}", "A conversation"),
    ("post", "/v1/conversations/{id}", "Change a conversation's metadata", ConversationUpdate),
    ("delete", "/v1/conversations/{id}", "Delete a conversation"),
    ("post", "/v1/conversations/{id}/items", "Add items to a conversation", ConversationItems),
    ("get", "/v1/conversations/{id}/items", "Items of a conversation"),
    ("get", "/v1/conversations/{id}/items/{item}", "An item of a conversation"),
    ("delete", "/v1/conversations/{id}/items/{item}", "Remove an item from a conversation"),
    ("post", "/v1/messages", "Message (Anthropic)", MessagesBody, True),
    ("post", "/v1/messages/count_tokens", "Count a prompt's tokens", MessagesBody),
    ("post", "/v1/embeddings", "Vectors of texts (OpenAI)", EmbeddingsBody),
    ("post", "/v1/rerank", "Rank documents for a query (Jina)", RerankBody),
    ("post", "/v2/rerank", "Rank documents for a query (Cohere)", RerankBody),
    ("post", "/v1/score", "Score pairs of texts (vLLM)", ScoreBody),
    ("post", "/v1/files", "Upload a file (OpenAI): a form"),
    ("get", "/v1/files", "List files"),
    ("get", "/v1/files/{id}", "One file"),
    ("delete", "/v1/files/{id}", "Delete a file"),
    ("get", "/v1/files/{id}/content", "The bytes of a file"),
    ("post", "/v1/batches", "Create a batch (OpenAI)", BatchBody),
    ("get", "/v1/batches", "List batches"),
    ("get", "/v1/batches/{id}", "One batch"),
    ("post", "/v1/batches/{id}/cancel", "Cancel a batch"),
    ("post", "/v1/messages/batches", "Create a batch of messages (Anthropic)", MessageBatchBody),
    ("get", "/v1/messages/batches", "List batches of messages"),
    ("get", "/v1/messages/batches/{id}", "One batch of messages"),
    ("delete", "/v1/messages/batches/{id}", "Delete a batch of messages"),
    ("post", "/v1/messages/batches/{id}/cancel", "Cancel a batch of messages"),
    ("get", "/v1/messages/batches/{id}/results", "The results of a batch of messages"),
    ("post", "/v1/tokenize", "Tokenize a text or a conversation", TokenizeBody),
    ("post", "/v1/detokenize", "Text of token ids", DetokenizeBody),
    ("post", "/v1/prefetch", "Load a prompt's blocks into a worker", PrefetchBody),
    ("delete", "/v1/prefetch/{id}", "Cancel a prefetch"),
    ("post", "/v1/cache/pins", "Pin a prompt's blocks", PinBody),
    ("get", "/v1/cache/pins", "List pins"),
    ("delete", "/v1/cache/pins", "Delete a pin, by id or prompt", UnpinBody),
    ("delete", "/v1/cache/pins/{id}", "Delete a pin"),
    ("post", "/v1/cache/clear", "Drop cached blocks that are not in use", ClearBody),
    ("post", "/v1/sessions/release", "Release ended sessions", ReleaseBody),
    (
        "post",
        "/v1/sessions/{id}/tools",
        "Report that a tool of a session started, goes on, ended or awaits approval; also a list",
        ToolBody,
    ),
    ("post", "/v1/hooks/claude-code", "Report a tool as a hook of Claude Code", ClaudeCodeHook),
    ("get", "/v1/models", "List the models that live workers serve"),
    ("get", "/v1/models/{id}", "One model"),
    ("get", "/busy_threshold", "List the models' busy thresholds"),
    ("post", "/busy_threshold", "Set or show a model's busy thresholds", BusyThresholdBody),
    ("get", "/health", "Readiness to serve requests"),
    ("get", "/live", "Liveness of the process"),
]
ENDPOINTS = [EndpointDescription(*row) for row in _ENDPOINTS]


PARTS = (  # decoded on their own
    *(*EDIT_TYPES, ChatToolBody, MessagesToolBody, ResponsesToolBody),
    *(*get_args(ContentBlock), *get_args(Part)),
)


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    bodies = list(dict.fromkeys(e.body for e in ENDPOINTS if e.body is not None))
    schemas, components = msgspec.json.schema_components([*bodies, *PARTS], ref_template=REF)
    refs = dict(zip(bodies, schemas, strict=False))
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        entry = _operation(endpoint, refs)
        paths.setdefault(endpoint.path, {})[endpoint.method] = entry
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvmesh", "version": VERSION},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": keys},
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _operation(
    endpoint: EndpointDescription, refs: dict[type[msgspec.Struct], Any]
) -> dict[str, Any]:
    content: dict[str, Any] = {JSON: {"schema": {"type": "object"}}}
    if endpoint.streams:
        content["text/event-stream"] = {}
    faults = {code: {"description": text} for code, text in FAULTS.items()}
    operation: dict[str, Any] = {
        "summary": endpoint.about,
        "responses": {"200": {"description": "success", "content": content}, **faults},
    }
    named = {"in": "path", "required": True, "schema": {"type": "string"}}
    if names := _PARAMETERS.findall(endpoint.path):
        operation["parameters"] = [{"name": name, **named} for name in names]
    if endpoint.body is not None:
        schema = refs[endpoint.body]
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return operation


PAGE = """<!doctype html><meta charset="utf-8"><title>kvmesh API</title>
<style>body{font:15px/1.5 system-ui;margin:2rem auto;max-width:60rem;padding:0 1rem}
code{background:#8882;padding:.1em .3em}summary{cursor:pointer;padding:.3rem 0}
td,th{text-align:left;padding:.1rem 1rem .1rem 0;vertical-align:top}b{font-family:monospace}</style>
<h1>kvmesh API</h1><p>The machine-readable form is <a href="/openapi.json">/openapi.json</a>.</p>
"""


def page() -> str:
    """The HTML page: every operation with the fields of its body."""
    return PAGE + "".join(_section(endpoint) for endpoint in ENDPOINTS)


def _section(endpoint: EndpointDescription) -> str:
    head = f"<b>{endpoint.method.upper()}</b> <code>{escape(endpoint.path)}</code> "
    rows = ""
    if endpoint.body is not None:
        fields = msgspec.structs.fields(endpoint.body)
        rows = "".join(_row(field) for field in fields)
    table = f"<table>{rows}</table>" if rows else ""
    return f"<details><summary>{head}{escape(endpoint.about)}</summary>{table}</details>\n"


def _row(field: msgspec.structs.FieldInfo) -> str:
    named = getattr(field.type, "__name__", "")
    kind = named if named and "|" not in str(field.type) else str(field.type)
    short = _MODULES.sub("", kind)
    need = " (required)" if field.required else ""
    return f"<tr><td><code>{field.encode_name}</code>{need}<td>{escape(short)}"


class Description:
    """Serves the document and the page, generated when they are first asked for."""

    @cached_property
    def _json(self) -> bytes:
        return msgspec.json.encode(document())

    @cached_property
    def _page(self) -> str:
        return page()

    async def json(self, _: web.Request) -> web.Response:
        return web.Response(body=self._json, content_type=JSON)

    async def html(self, _: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html")
