"""Replays of streams of chat completions and completions."""

from itertools import chain
from typing import Any

Json = dict[str, Any]


def _chunks(events: list[Any]) -> tuple[Json, list[Json], Json, bool]:
    """Fields of all chunks, their choices, fields of the last one, and False after an error."""
    assert events, "the stream is empty"
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert "[DONE]" not in chunks
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
            assert chunk["usage"], "an empty chunk"
            last |= {"usage": chunk["usage"]}
            continue
        assert len(chunk["choices"]) == 1
        assert chunk.get("usage") is None
        choices.append(chunk["choices"][0])
        if "nvext" in chunk and choices[-1]["finish_reason"]:
            last = {"nvext": chunk["nvext"]}
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


def chat(events: list[Any]) -> Json | None:
    common, choices, last, ended = _chunks(events)
    found = _by_choice(choices, ended)
    if not ended:
        return None
    assert common["object"] == "chat.completion.chunk"
    head = {**common, "object": "chat.completion"}
    return {**head, "choices": [_chat_choice(deltas) for deltas in found.values()], **last}


def _chat_choice(deltas: list[Json]) -> Json:
    message: Json = dict(deltas[0]["delta"])
    assert message == {"role": "assistant", "content": "", "refusal": None}
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


def completions(events: list[Any]) -> Json | None:
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
