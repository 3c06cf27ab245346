"""Replays of streams of the Messages API."""

import json
from typing import Any

Json = dict[str, Any]
MESSAGE_DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
    "compaction_delta": ("compaction", "content"),
}
EMPTY: dict[str, Json] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
    "compaction": {"content": ""},
}


def messages(events: list[Any]) -> Json | None:
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
    content = [_whole_block(block) for block in blocks]
    calls = any(block["type"] == "tool_use" and _is_whole(block) for block in blocks)
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


def _is_whole(call: Json) -> bool:
    """True unless the arguments break off; an answer ends for a call only with whole ones."""
    try:
        json.loads(call["partial_json"] or "{}")
    except json.JSONDecodeError:
        return False
    return True


def _whole_block(block: Json) -> Json:
    whole = block["type"] == "tool_use" and _is_whole(block)
    arguments = {"input": json.loads(block["partial_json"] or "{}")} if whole else {}
    return {**{name: block[name] for name in block if name != "partial_json"}, **arguments}
