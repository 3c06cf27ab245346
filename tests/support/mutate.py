"""Nearly valid bodies: valid ones for every endpoint, and mutations of them."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from support.frontend import MODEL

Path = tuple[str | int, ...]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["Oslo"],
    "stop_token_ids": [5],
    "logit_bias": {"7": 1.0},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": False,
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 1,
    "prompt_cache_key": "a",
}
NVEXT = {
    "agent_hints": {"priority": 1, "strict_priority": 0, "latency_sensitivity": 0.5, "osl": 9},
    "session_control": {"session_id": "s", "action": "open", "timeout": 3},
    "cache_salt": "salt",
    "extra_fields": ["worker_id", "timing", "cache", "routing", "stop_reason", "ignored"],
    "retention": [{"start": 0, "end": 4, "priority": 3, "duration_s": 2}],
    "policy": "kv",
    "router_config_override": {"prefill_weight": 1.0},
    "greed_sampling": True,
    "use_raw_prompt": False,
}
TOOL = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": True}
CUSTOM = {"name": "patch", "description": "Applies.", "format": {"type": "text"}}
CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ],
    "max_tokens": 4,
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [{"type": "function", "function": TOOL}, {"type": "custom", "custom": CUSTOM}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": True,
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "low",
    "nvext": NVEXT,
    **SAMPLING,
}
PARSED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "max_completion_tokens": 4,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
    },
}
COMPLETION = {
    "model": MODEL,
    "prompt": ["One", [1, 2, 3]],
    "max_tokens": 4,
    "logprobs": 2,
    "echo": False,
    "nvext": NVEXT,
    **SAMPLING,
}
RESPONSE = {
    "model": MODEL,
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "done"},
    ],
    "max_output_tokens": 4,
    "stream": False,
    "store": False,
    "tools": [
        {"type": "function", **TOOL},
        {"type": "custom", **CUSTOM},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
    ],
    "tool_choice": {"type": "function", "name": "weather"},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs"],
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"a": "b"},
    "prompt_cache_key": "a",
    "nvext": NVEXT,
}
PARSED_RESPONSE = {
    "model": MODEL,
    "input": "Someone",
    "store": False,
    "max_output_tokens": 4,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "verbosity": "low"},
}
MESSAGE = {
    "model": MODEL,
    "max_tokens": 4,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "sunny", "is_error": False},
                {"type": "document", "source": {"type": "text", "data": "x"}, "title": "T"},
            ],
        },
    ],
    "tools": [{"name": "weather", "description": "x", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "stop_sequences": ["Oslo"],
    "stream": False,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "metadata": {"user_id": '{"session_id": "s"}'},
    "nvext": NVEXT,
}
PARSED_MESSAGE = {
    "model": MODEL,
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "Someone"}],
    "output_format": {"type": "json_schema", "schema": SCHEMA},
}
TOKENIZE = {"model": MODEL, "messages": CHAT["messages"], "tools": CHAT["tools"]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", PARSED),
    ("/v1/completions", COMPLETION),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", PARSED_RESPONSE),
    ("/v1/responses/input_tokens", RESPONSE),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", PARSED_MESSAGE),
    ("/v1/messages/count_tokens", MESSAGE),
    ("/v1/tokenize", TOKENIZE),
    ("/v1/tokenize", {"model": MODEL, "prompt": "Hello"}),
    ("/v1/detokenize", {"model": MODEL, "tokens": [1, 2, 3]}),
]
# bounded, since large values are valid and only make the fuzz test wait for tokens
LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}


def paths(value: object, at: Path = ()) -> Iterator[Path]:
    """The paths of all values inside a JSON value, the outermost first."""
    yield at
    items: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        yield from paths(inner, (*at, key))


def replaced(value: Any, at: Path, new: object) -> Any:
    """A copy with `new` at a path."""
    if not at:
        return new
    changed = copy.deepcopy(value)
    inner = changed
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = new
    return changed


def without(value: Any, at: Path) -> Any:
    """A copy without the value at a path."""
    changed = copy.deepcopy(value)
    inner = changed
    for key in at[:-1]:
        inner = inner[key]
    del inner[at[-1]]
    return changed


STRANGE: list[object] = [
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63) - 1, 2**64, 10**30, 0.5, -0.5, 1e308),
    *("", "x", "\x00", "\x00" * 9, "💥" * 20, "a" * 100_000, "../..", "{{ 7*7 }}", "<|im_end|>"),
    *([], [[]], [None], [1, "a"], ["x"] * 5000, {}, {"": None}, {"a": {"a": {}}}, {"type": "x"}),
    *({"type": 5}, {"$ref": "#"}, {"properties": 5}, {"pattern": "(("}, {"enum": 5}, {"anyOf": 5}),
]


def _values() -> SearchStrategy[object]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    nested = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=6,
    )
    return st.sampled_from(STRANGE) | nested


def _tokens_bounded(at: Path) -> bool:
    return not (at and at[-1] in LIMITS)


@st.composite
def wrong_values(draw: DrawFn, body: dict[str, Any]) -> bytes:
    """A body with one or two values replaced or removed."""
    changed: Any = body
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.sampled_from([p for p in paths(changed) if p and _tokens_bounded(p)] or [()]))
        gone = at and draw(st.integers(0, 4)) == 0
        changed = without(changed, at) if gone else replaced(changed, at, draw(_values()))
    return json.dumps(changed).encode()


def _cut(data: bytes, at: int, _: bytes) -> bytes:
    return data[:at]


def _insert(data: bytes, at: int, junk: bytes) -> bytes:
    return data[:at] + junk + data[at:]


def _overwrite(data: bytes, at: int, junk: bytes) -> bytes:
    return data[:at] + junk + data[at + len(junk) :]


MUTATIONS: list[Callable[[bytes, int, bytes], bytes]] = [_cut, _insert, _overwrite]
JUNK = [
    *(b"\x00", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\\ud800", b"NaN", b"-Infinity", b"1e999"),
    *(b"[" * 5000, b'{"a":' * 5000, b"]", b'"', b",", b"9" * 400, b"\xef\xbb\xbf", b"/**/"),
]


@st.composite
def broken_bytes(draw: DrawFn, body: dict[str, Any]) -> bytes:
    """A truncated body, or one with stray bytes."""
    data = json.dumps(body).encode()
    way = draw(st.sampled_from(MUTATIONS))
    junk = draw(st.sampled_from(JUNK) | st.binary(min_size=1, max_size=8))
    return way(data, draw(st.integers(0, len(data))), junk)


def doubled(body: dict[str, Any], key: str, second: object) -> bytes:
    """A body with a duplicate key."""
    text = json.dumps(body)
    return f"{text[:-1]}, {json.dumps(key)}: {json.dumps(second)}}}".encode()


def nested(body: dict[str, Any], key: str, depth: int) -> bytes:
    """A body with lists nested `depth` times under a key."""
    text = json.dumps({k: v for k, v in body.items() if k != key})
    return f"{text[:-1]}, {json.dumps(key)}: {'[' * depth}{']' * depth}}}".encode()
