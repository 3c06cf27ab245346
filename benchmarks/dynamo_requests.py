"""A hundred requests to NVIDIA Dynamo's own frontend and to kvmesh, and how the answers differ.

Both serve the demo model with mock workers. For each request it prints the statuses and the fields
that one side has alone; docs/migration.md explains the differences, by the names in brackets. It
fails if one has no explanation. `--dynamo` names a virtual environment with ai-dynamo.
"""

import argparse
import http.client
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from chat_load import MODEL
from dynamo_fleet import DynamoFleet
from local_mesh import running_mesh
from rows import FAST_MS

JsonObject = dict[str, Any]
CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
TIMEOUT_S = 60.0
# Fields of kvmesh alone that clients of Dynamo skip.
MORE = ("usage.completion_tokens_details.reasoning_tokens",)
HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}


class Probe(NamedTuple):
    """One request. `why` names the explanation of a difference, if one is expected."""

    name: str
    method: str
    path: str
    body: JsonObject | None = None
    headers: JsonObject | None = None
    why: str = ""


class Answer(NamedTuple):
    """The status of an answer, and the paths of its fields, those of all events of a stream."""

    status: int
    fields: frozenset[str]


def chat(**fields: Any) -> JsonObject:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8, **fields}


def probes() -> list[Probe]:
    """All requests, each once."""
    return [
        *_of_chat(),
        *_of_nvext(),
        *_of_headers(),
        *_of_texts(),
        *_of_responses(),
        *_of_messages(),
        *_of_others(),
    ]


def _of_chat() -> Iterator[Probe]:
    rows: list[tuple[str, JsonObject, str]] = [
        ("plain", {}, ""),
        ("stream", {"stream": True}, "chunks"),
        ("usage", {"stream": True, "stream_options": {"include_usage": True}}, "chunks"),
        (
            "continuous usage",
            {
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            "chunks",
        ),
        ("logprobs", {"logprobs": True}, "mocker"),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 2}, "mocker"),
        ("token ids", {"logprobs": True, "return_tokens_as_token_ids": True}, "mocker"),
        ("n", {"n": 2}, ""),
        ("seed", {"seed": 7, "temperature": 0.5}, ""),
        ("stop", {"stop": ["zz"]}, ""),
        ("stop ids", {"stop": [5]}, ""),
        ("tools", {"tools": [TOOL]}, ""),
        ("tool required", {"tools": [TOOL], "tool_choice": "required"}, "constraints"),
        ("tool none", {"tools": [TOOL], "tool_choice": "none"}, ""),
        ("json object", {"response_format": {"type": "json_object"}}, ""),
        ("max_completion_tokens", {"max_completion_tokens": 4}, ""),
        ("logit_bias", {"logit_bias": {"5": 1}}, ""),
        ("min_tokens", {"min_tokens": 2}, ""),
        ("ignore_eos", {"ignore_eos": True}, ""),
        ("top_k", {"top_k": 5}, ""),
        ("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}, ""),
        ("reasoning_effort", {"reasoning_effort": "low"}, ""),
        ("thinking budget", {"thinking_token_budget": 4}, ""),
        ("unknown field", {"foo": 1}, "unknown fields"),
        ("verbosity", {"verbosity": "low"}, "unknown fields"),
        ("no messages", {"messages": []}, "errors"),
        ("wrong type", {"max_tokens": "x"}, "errors"),
        ("temperature 9", {"temperature": 9}, "errors"),
        ("unknown model", {"model": "nobody"}, "errors"),
        ("too long", {"messages": [{"role": "user", "content": "word " * 300_000}]}, "errors"),
        ("image", {"messages": [_with_image()]}, "images"),
    ]
    for name, fields, why in rows:
        yield Probe(f"chat {name}", "POST", CHAT, chat(**fields), why=why)


def _with_image() -> JsonObject:
    url = "data:image/png;base64,iVBORw0KGgo="
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": "?"},
            {"type": "image_url", "image_url": {"url": url}},
        ],
    }


def _of_nvext() -> Iterator[Probe]:
    names = (
        *("worker_id", "timing", "stop_reason", "detailed_finish_reason"),
        *("completion_token_ids", "engine_data", "routed_experts", "prompt_logprobs"),
    )
    for name in (*names, "unheard_of"):
        why = "nvext" if name in ("worker_id", "timing", "stop_reason") else ""
        yield _nvext(f"extra {name}", {"extra_fields": [name]}, why)
        if name in names[:5]:
            yield _nvext(f"extra {name}, stream", {"extra_fields": [name]}, "chunks", stream=True)
    for name in ("formatted_prompt", "token_ids", "llm_metrics"):
        yield _nvext(f"annotation {name}", {"annotations": [name]}, "chunks", stream=True)
    hints = {"priority": 3, "strict_priority": 1, "osl": 8, "speculative_prefill": True}
    yield _nvext("agent_hints", {"agent_hints": hints})
    yield _nvext("latency_sensitivity", {"agent_hints": {"latency_sensitivity": 5.0}})
    yield _nvext("unknown hint", {"agent_hints": {"novel": 1}}, "unknown fields")
    control = {"session_id": "s", "action": "open", "timeout": 60}
    yield _nvext("session open", {"session_control": control}, "unknown fields")
    yield _nvext("agent_context", {"agent_context": {"session_id": "s"}}, "unknown fields")
    yield _nvext("cache_control", {"cache_control": {"type": "ephemeral"}}, "unknown fields")
    yield _nvext("cache_salt", {"cache_salt": "a"})
    yield _nvext("greed_sampling", {"greed_sampling": True})
    yield _nvext("use_raw_prompt", {"use_raw_prompt": True})
    yield _nvext("token_data", {"token_data": [5, 6, 7, 8]})
    yield _nvext("max_thinking_tokens", {"max_thinking_tokens": 4})
    yield _nvext("backend_instance_id", {"backend_instance_id": 1}, "errors")
    yield _nvext("decode_worker_id", {"decode_worker_id": 1}, "errors")
    taints = {"required_taints": ["gpu=x"]}
    yield _nvext("required_taints", {"routing_constraints": taints}, "errors")
    preferred = {"preferred_taints": {"gpu=x": 1.0}}
    yield _nvext("preferred_taints", {"routing_constraints": preferred})
    yield _nvext("router", {"router": {"ttft_target": 1.0}}, "errors")
    yield _nvext("unknown", {"novel": 1}, "unknown fields")


def _nvext(name: str, nvext: JsonObject, why: str = "", stream: bool = False) -> Probe:
    return Probe(f"nvext {name}", "POST", CHAT, chat(nvext=nvext, stream=stream), why=why)


def _of_headers() -> Iterator[Probe]:
    for header, value, why in (
        ("x-dynamo-request-priority", "3", ""),
        ("x-dynamo-request-strict-priority", "1", ""),
        ("x-dynamo-meta-policy-class", "batch", ""),
        ("x-worker-instance-id", "3", "errors"),
        ("x-dynamo-worker-instance-id", "3", "errors"),
        ("x-prefill-instance-id", "3", ""),
        ("x-dp-rank", "0", ""),
        ("x-data-parallel-rank", "0", ""),
        ("x-tenant-id", "a", ""),
        ("x-dynamo-session-id", "s", ""),
    ):
        yield Probe(f"header {header}", "POST", CHAT, chat(), {header: value}, why)


def _of_texts() -> Iterator[Probe]:
    rows: list[tuple[str, JsonObject, str]] = [
        ("plain", {}, ""),
        ("stream", {"stream": True}, "chunks"),
        ("ids", {"prompt": [5, 6, 7]}, ""),
        ("list", {"prompt": ["a b", "c d"]}, ""),
        ("logprobs", {"logprobs": 1}, "mocker"),
        ("echo", {"echo": True}, ""),
        ("suffix", {"suffix": "x"}, "errors"),
        ("nvext", {"nvext": {"extra_fields": ["completion_token_ids"]}}, ""),
    ]
    for name, fields, why in rows:
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, **fields}
        yield Probe(f"completions {name}", "POST", TEXT, body, why=why)


def _of_responses() -> Iterator[Probe]:
    rows: list[tuple[str, JsonObject, str]] = [
        ("plain", {}, "responses"),
        ("stream", {"stream": True}, "responses"),
        ("unknown previous", {"previous_response_id": "resp_x"}, "errors"),
        ("nvext", {"nvext": {"extra_fields": ["worker_id"]}}, "responses"),
    ]
    for name, fields, why in rows:
        body = {"model": MODEL, "input": "Hi", "max_output_tokens": 16, **fields}
        yield Probe(f"responses {name}", "POST", RESPONSES, body, why=why)


def _of_messages() -> Iterator[Probe]:
    rows: list[tuple[str, JsonObject, str]] = [
        ("plain", {}, "messages"),
        ("stream", {"stream": True}, "messages"),
        ("nvext", {"nvext": {"extra_fields": ["worker_id"]}}, "messages"),
        ("without max_tokens", {"max_tokens": None}, "errors"),
    ]
    for name, fields, why in rows:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 8, **fields}
        body = {key: value for key, value in body.items() if value is not None}
        yield Probe(f"messages {name}", "POST", MESSAGES, body, why=why)
    count = {"model": MODEL, "messages": HELLO}
    yield Probe("messages count", "POST", f"{MESSAGES}/count_tokens", count, why="counts")


def _of_others() -> Iterator[Probe]:
    yield Probe("models", "GET", "/v1/models", why="models")
    yield Probe("health", "GET", "/health", why="health")
    yield Probe("live", "GET", "/live", why="health")
    yield Probe("busy_threshold", "GET", "/busy_threshold", why="busy_threshold")
    limits = {"model": MODEL, "active_decode_blocks_threshold": 0.9}
    yield Probe("busy_threshold set", "POST", "/busy_threshold", limits, why="busy_threshold")
    yield Probe(
        "embeddings", "POST", "/v1/embeddings", {"model": MODEL, "input": "a"}, why="errors"
    )
    yield Probe("unknown path", "GET", "/v1/nothing", why="errors")


def ask(url: str, probe: Probe) -> Answer:
    """Send a request and read its answer to the end."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
    body = None if probe.body is None else json.dumps(probe.body).encode()
    headers = {"Content-Type": "application/json", **(probe.headers or {})}
    try:
        connection.request(probe.method, probe.path, body, headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        kind = response.headers.get("Content-Type", "")
    finally:
        connection.close()
    found = _events(text) if "event-stream" in kind else _fields(_parsed(text), "")
    return Answer(response.status, frozenset(found))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _events(text: str) -> Iterator[str]:
    """The fields of all events, their names, those of comments, and what the chunks are like."""
    chunks: list[Any] = []
    for line in text.splitlines():
        field, _, value = line.partition(":")
        if field == "event":
            yield f"event {value.strip()}"
        elif field == "data" and value.strip() != "[DONE]":
            chunks.append(_parsed(value))
            yield from _fields(chunks[-1], "")
    objects = [chunk for chunk in chunks if isinstance(chunk, dict) and "choices" in chunk]
    if any(not chunk["choices"] for chunk in objects):
        yield "a chunk without choices"
    if objects and "nvext" in objects[0]:
        yield "nvext in the first chunk"
    if objects and all(chunk.get("usage") for chunk in objects):
        yield "usage in every chunk"


def _fields(value: Any, path: str) -> Iterator[str]:
    """The paths of the fields with a value."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _fields(each, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for each in value:
            yield from _fields(each, f"{path}[]")
    elif value is not None:
        yield path


def compare(probe: Probe, there: Answer, here: Answer) -> tuple[bool, str]:
    """True if the answers are alike, and the line about them."""
    here = Answer(here.status, here.fields - {*MORE})
    alike = there == here
    parts = [f"{there.status} {here.status}"]
    if there.status == here.status:
        parts += [f"-{name}" for name in sorted(there.fields - here.fields)]
        parts += [f"+{name}" for name in sorted(here.fields - there.fields)]
    reason = f" [{probe.why}]" if probe.why and not alike else ""
    return alike, f"{'=' if alike else '≠'} {probe.name}{reason}: {' '.join(parts)}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--dynamo", type=Path, required=True, metavar="VENV")
    options = arguments.parse_args()
    os.environ.setdefault("DYN_ENABLE_ANTHROPIC_API", "1")
    wanted = probes()
    alike, unexplained = 0, []
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        fleet = DynamoFleet(Path(folder), options.dynamo, "tcp", workers=1)
        try:
            fleet.start(FAST_MS)
            with running_mesh(1) as mesh:
                for probe in wanted:
                    same, line = compare(probe, ask(fleet.url, probe), ask(mesh.url, probe))
                    alike += same
                    unexplained += [] if same or probe.why else [probe.name]
                    print(line, flush=True)
        finally:
            fleet.stop()
    print(f"{len(wanted)} requests: {alike} answered alike, {len(wanted) - alike} not")
    if unexplained:
        print(f"without an explanation: {', '.join(unexplained)}")
    return bool(unexplained)


if __name__ == "__main__":
    raise SystemExit(main())
