"""Replays the streams of every API strictly, as the most careful of their clients do.

`replay` returns the answer that the events of a stream build, in the form of the whole answer. It
raises AssertionError if an event is not announced, is out of order, or contradicts an earlier one.
"""

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

Json = dict[str, Any]
DONE = "[DONE]"
PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}


def parse(text: str) -> list[Any]:
    """The events of a stream, without comments; `[DONE]` is a string."""
    assert text.endswith("\n\n"), f"the stream breaks off: {text[-200:]!r}"
    events: list[Any] = []
    for frame in text.split("\n\n")[:-1]:
        lines = [line for line in frame.split("\n") if not line.startswith(":")]
        fields = [line.partition(": ")[::2] for line in lines]
        if not fields:
            continue
        data = fields[-1][1]
        event = data if data == DONE else json.loads(data)
        names = [name for name, _ in fields]
        if "type" in event and event != DONE:
            assert fields[0] == ("event", event["type"]), frame
            assert names == ["event", "data"], frame
        else:
            assert names == ["data"], frame
        events.append(event)
    return events


def replay(api: str, events: list[Any]) -> Json | None:
    """The answer that a stream of the API builds; None if it ends with an error."""
    return REPLAYS[api](events)


def check(path: str, events: list[Any]) -> None:
    """Replay the events of a stream from this path, which may have a query."""
    replay(PATHS[path.partition("?")[0]], events)


def without_form(api: str, answer: Json) -> Json:
    """A whole answer without what a stream of the API cannot tell.

    Those of chat completions say "" for no text, and nothing of the probabilities of no tokens.
    """
    if api != "chat":
        return answer
    choices = []
    for choice in answer["choices"]:
        message = {**choice["message"], "content": choice["message"]["content"] or ""}
        known = choice["logprobs"] if (choice["logprobs"] or {}).get("content") else None
        choices.append({**choice, "message": message, "logprobs": known})
    return {**answer, "choices": choices}


# --- chat completions and completions ----------------------------------------------------------


def _chunks(events: list[Any]) -> tuple[Json, list[Json], Json, bool]:
    """What all chunks have, their choices, what the last one adds, and False after an error."""
    assert events, "the stream is empty"
    assert events[-1] == DONE
    chunks = events[:-1]
    assert DONE not in chunks
    failed = bool(chunks) and "error" in chunks[-1]
    chunks = chunks[:-1] if failed else chunks
    assert not any("error" in chunk for chunk in chunks)
    common = {key: chunks[0][key] for key in ("id", "object", "created", "model")} if chunks else {}
    choices: list[Json] = []
    last: Json = {}
    for place, chunk in enumerate(chunks):
        assert {key: chunk[key] for key in common} == common
        if not chunk["choices"]:
            assert place == len(chunks) - 1
            last = {key: chunk[key] for key in ("usage", "nvext") if key in chunk}
            assert last, "an empty chunk"
            continue
        assert len(chunk["choices"]) == 1
        assert chunk.get("usage") is None
        choices.append(chunk["choices"][0])
    asked = {"usage" in chunk for chunk in chunks}
    assert len(asked) <= 1, "some chunks have `usage`, others have not"
    assert failed or last.get("usage") is not None or asked != {True}
    return common, choices, last, not failed


def _by_choice(choices: list[Json], ended: bool) -> dict[int, list[Json]]:
    """The deltas of each choice. The last of each has the reason of its end, and no other."""
    found: dict[int, list[Json]] = {}
    for delta in choices:
        found.setdefault(delta["index"], []).append(delta)
    assert sorted(found) == list(range(len(found))) or not ended
    for deltas in found.values():
        assert all(delta["finish_reason"] is None for delta in deltas[:-1])
        assert not ended or deltas[-1]["finish_reason"]
    return dict(sorted(found.items()))


def _chat(events: list[Any]) -> Json | None:
    common, choices, last, ended = _chunks(events)
    found = _by_choice(choices, ended)
    if not ended:
        return None
    assert common["object"] == "chat.completion.chunk"
    head = {**common, "object": "chat.completion"}
    return {**head, "choices": [_chat_choice(deltas) for deltas in found.values()], **last}


def _chat_choice(deltas: list[Json]) -> Json:
    first, message = deltas[0]["delta"], {"content": "", "refusal": None}
    assert first == {"role": "assistant", "content": "", "refusal": None}
    message["role"] = "assistant"
    calls: list[Json] = []
    for delta in (entry["delta"] for entry in deltas[1:]):
        assert set(delta) <= {"content", "reasoning_content", "tool_calls"}, delta
        for key in ("content", "reasoning_content"):
            if key in delta:
                assert delta[key], "an empty delta"
                message[key] = (message.get(key) or "") + delta[key]
        for call in delta.get("tool_calls", []):
            _extend_calls(calls, call)
    if calls:
        message["tool_calls"] = calls
    finish = deltas[-1]["finish_reason"]
    assert calls or finish != "tool_calls"
    assert finish != "stop" or not calls
    return {
        "index": deltas[0]["index"],
        "message": message,
        "logprobs": _chat_logprobs(deltas),
        "finish_reason": finish,
    }


def _extend_calls(calls: list[Json], delta: Json) -> None:
    delta = dict(delta)
    index = delta.pop("index")
    if index == len(calls):
        assert delta["id"]
        assert set(delta) == {"id", "type", delta["type"]}
        kind = delta["type"]
        key = "input" if kind == "custom" else "arguments"
        assert delta[kind]["name"]
        assert delta[kind][key] == ""
        assert delta["id"] not in [call["id"] for call in calls]
        calls.append({**delta, kind: dict(delta[kind])})
        return
    assert index == len(calls) - 1, "a call goes on that has ended, or has not begun"
    kind = calls[-1]["type"]
    key = "input" if kind == "custom" else "arguments"
    assert set(delta) == {kind}
    assert set(delta[kind]) == {key}
    assert delta[kind][key]
    calls[-1][kind][key] += delta[kind][key]


def _chat_logprobs(deltas: list[Json]) -> Json | None:
    given = [entry["logprobs"]["content"] for entry in deltas if entry["logprobs"] is not None]
    return {"content": list(chain(*given)), "refusal": None} if given else None


def _completions(events: list[Any]) -> Json | None:
    common, choices, last, ended = _chunks(events)
    found = _by_choice(choices, ended)
    if not ended:
        return None
    assert common["object"] == "text_completion"
    built = [
        {
            "index": index,
            "text": "".join(delta["text"] for delta in deltas),
            "logprobs": _text_logprobs(deltas),
            "finish_reason": deltas[-1]["finish_reason"],
        }
        for index, deltas in found.items()
    ]
    return {**common, "choices": built, **last}


def _text_logprobs(deltas: list[Json]) -> Json | None:
    given = [delta["logprobs"] for delta in deltas if delta["logprobs"] is not None]
    if not given:
        return None
    joined: Json = {key: list(chain(*(part[key] for part in given))) for key in given[0]}
    assert len({len(values) for values in joined.values()}) == 1
    return joined


# --- messages ----------------------------------------------------------------------------------

MESSAGE_DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}
EMPTY = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def _messages(events: list[Any]) -> Json | None:
    events = [event for event in events if event["type"] != "ping"]
    assert events, "the stream is empty"
    if events[-1]["type"] == "error":
        events = events[:-1]
        _blocks(events[1:])
        return None
    start, *middle, last, stop = events
    assert (start["type"], last["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    message = start["message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    blocks, ended = _blocks(middle)
    assert ended, "a block is still open"
    content = [_whole_block(block, last["delta"]["stop_reason"]) for block in blocks]
    calls = any(block["type"] == "tool_use" for block in content)
    assert calls or last["delta"]["stop_reason"] != "tool_use"
    assert not calls or last["delta"]["stop_reason"] != "end_turn"
    extra = {key: value for key, value in last.items() if key not in ("type", "delta", "usage")}
    usage = {**message["usage"], **last["usage"]}
    return {**message, "content": content, **last["delta"], "usage": usage, **extra}


def _blocks(events: list[Json]) -> tuple[list[Json], bool]:
    """The blocks so far, and whether the last one has ended."""
    blocks: list[Json] = []
    ended = True
    for event in events:
        if event["type"] == "content_block_start":
            assert ended, "a block begins within another"
            assert event["index"] == len(blocks)
            block = event["content_block"]
            assert EMPTY[block["type"]].items() <= block.items()
            assert block["type"] != "tool_use" or (block["id"] and block["name"])
            blocks.append({**block, "partial_json": ""})
            ended = False
            continue
        assert not ended, f"{event['type']} without a block"
        assert event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            assert blocks[-1]["type"] != "thinking" or blocks[-1]["signature"]
            ended = True
            continue
        assert event["type"] == "content_block_delta", event
        delta = event["delta"]
        kind, key = MESSAGE_DELTAS[delta["type"]]
        assert blocks[-1]["type"] == kind
        assert delta[key], "an empty delta"
        assert not blocks[-1].get("signature"), "thinking goes on after its signature"
        blocks[-1][key] += delta[key]
    return blocks, ended


def _whole_block(block: Json, reason: str) -> Json:
    block = dict(block)
    partial = block.pop("partial_json")
    if block["type"] == "tool_use":
        try:
            block["input"] = json.loads(partial or "{}")
        except json.JSONDecodeError:
            assert reason != "tool_use", f"arguments that are not JSON: {partial!r}"
    return block


# --- responses ---------------------------------------------------------------------------------

PARTS = {
    ("message", "content", "output_text"),
    ("reasoning", "content", "reasoning_text"),
    ("reasoning", "summary", "summary_text"),
}
CALLS = {
    "response.function_call_arguments": ("function_call", "arguments"),
    "response.custom_tool_call_input": ("custom_tool_call", "input"),
}
TEXTS = {
    "response.output_text": "output_text",
    "response.reasoning_text": "reasoning_text",
    "response.reasoning_summary_text": "summary_text",
}
LATE = {"status", "encrypted_content"}  # known at the end of an item only
ENDS = ("completed", "incomplete", "failed")


class _Response:
    """The response that events have built so far."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self.item: Json | None = None
        self.part: Json | None = None
        self.text_done = False

    def event(self, event: Json) -> None:
        kind, _, step = event["type"].rpartition(".")
        if kind == "response.output_item":
            self._item(event, step)
            return
        assert self.item is not None, f"{event['type']} without an item"
        assert event["item_id"] == self.item["id"]
        assert event["output_index"] == len(self.items)
        if kind in ("response.content_part", "response.reasoning_summary_part"):
            self._part(event, step, "summary" if "summary" in kind else "content")
        elif kind in CALLS:
            self._call(event, step, *CALLS[kind])
        else:
            self._text(event, step, TEXTS[kind])

    def _item(self, event: Json, step: str) -> None:
        assert event["output_index"] == len(self.items)
        given = event["item"]
        if step == "added":
            assert self.item is None, "an item begins within another"
            assert given["id"] not in [item["id"] for item in self.items]
            assert given.get("status") in ("in_progress", None)
            assert not any(given.get(key) for key in ("content", "summary", "arguments", "input"))
            self.item, self.text_done = json.loads(json.dumps(given)), False
            return
        assert step == "done"
        assert self.part is None, "a part is still open"
        assert self.text_done, "the item's text is not repeated"
        assert _early(given) == _early(self.item or {})
        assert given.get("status") in ("completed", "incomplete", None)
        self.items.append(given)
        self.item = None

    def _part(self, event: Json, step: str, field: str) -> None:
        item = self.item or {}
        index, given = event[f"{field}_index"], event["part"]
        if step == "added":
            assert self.part is None
            assert index == len(item[field])
            assert (item["type"], field, given["type"]) in PARTS
            assert given["text"] == ""
            self.part, self.text_done = dict(given), False
            item[field].append(self.part)
            return
        assert step == "done"
        assert self.text_done, "the part's text is not repeated"
        assert index == len(item[field]) - 1
        assert given == self.part
        self.part = None

    def _text(self, event: Json, step: str, kind: str) -> None:
        part = self.part
        assert part is not None, f"{event['type']} without a part"
        assert part["type"] == kind
        field = "summary" if kind == "summary_text" else "content"
        assert event[f"{field}_index"] == len((self.item or {})[field]) - 1
        assert not self.text_done
        if step == "delta":
            assert event["delta"], "an empty delta"
            part["text"] += event["delta"]
            if kind == "output_text":
                part["logprobs"] = part["logprobs"] + event["logprobs"]
            return
        assert step == "done"
        assert event["text"] == part["text"]
        assert kind != "output_text" or event["logprobs"] == part["logprobs"]
        self.text_done = True

    def _call(self, event: Json, step: str, kind: str, field: str) -> None:
        item = self.item or {}
        assert item["type"] == kind
        assert not self.text_done
        if step == "delta":
            assert event["delta"], "an empty delta"
            item[field] += event["delta"]
            return
        assert step == "done"
        assert event[field] == item[field]
        assert event.get("name", item["name"]) == item["name"]
        self.text_done = True


def _early(item: Json) -> Json:
    return {key: value for key, value in item.items() if key not in LATE}


def _responses(events: list[Any]) -> Json | None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, progress, *middle, last = events
    assert created["type"] == "response.created"
    assert progress["type"] == "response.in_progress"
    first, final = created["response"], last["response"]
    assert progress["response"] == first
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    state = _Response()
    for event in middle:
        state.event(event)
    assert state.item is None, "an item is still open"
    assert final["status"] in ENDS
    assert last["type"] == f"response.{final['status']}"
    assert final["output"] == state.items
    for key in set(first) - {"status", "output", "usage", "error", "incomplete_details", "store"}:
        assert final[key] == first[key]
    assert not final["store"] or first["store"]
    assert (final["incomplete_details"] is not None) == (final["status"] == "incomplete")
    assert (final["error"] is not None) == (final["status"] == "failed")
    if final["status"] == "failed":
        return None
    assert final["usage"]["total_tokens"]
    return final


REPLAYS: dict[str, Callable[[list[Any]], Json | None]] = {
    "chat": _chat,
    "completions": _completions,
    "messages": _messages,
    "responses": _responses,
}
