"""Replays of streams of the Responses API."""

import json
from typing import Any

Json = dict[str, Any]
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
            self.item = json.loads(json.dumps(given))
            self.text_done = given["type"] == "compaction"  # it begins complete
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


def responses(events: list[Any]) -> Json | None:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, progress, *middle, last = events
    assert created["type"] == "response.created"
    assert progress["type"] == "response.in_progress"
    first: Json = created["response"]
    final: Json = last["response"]
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
