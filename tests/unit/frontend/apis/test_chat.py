"""The Chat Completions API: body to request, answer to frames."""

from support.stamp import STAMP
from unit.frontend.apis.answers import ANSWER, body, stream, whole

from kvmesh.frontend.apis.base import Ending
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.conversation import ToolCall, ToolChoice


def test_chat_streams_every_kind_of_content_in_order() -> None:
    api = Chat()
    sent = body(api, stream=True, stream_options={"include_usage": True})
    chunks = stream(api.parse(sent, {}, STAMP).renderer, ANSWER, Ending("stop"))
    assert chunks.pop() == "[DONE]"
    assert chunks.pop()["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert chunks.pop()["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hmm"
    # texts that a call separates stay apart, as in the whole answer
    assert "".join(d.get("content") or "" for d in deltas) == "I look\n\ndone"
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert [call["index"] for call in calls] == [0, 0, 0, 1]
    assert calls[0]["id"] == "c1"
    assert "".join(call["function"]["arguments"] for call in calls[:3]) == '{"path":"a"}'
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_chat_answers_whole() -> None:
    answer = whole(Chat(), ANSWER, Ending("stop"))
    message = answer["choices"][0]["message"]
    assert message["content"] == "I look\n\ndone"
    assert message["reasoning_content"] == "hmm"
    assert [call["id"] for call in message["tool_calls"]] == ["c1", "c2"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_a_named_tool_choice_is_kept() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    choice = {"type": "function", "function": {"name": "f"}}
    request = Chat().parse(body(Chat(), tools=tools, tool_choice=choice), {}, STAMP).request
    assert request.tool_choice == ToolChoice("required", ("f",))


def test_a_returned_call_may_lack_its_id() -> None:
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    sent = body(Chat(), messages=[{"role": "user", "content": "Hi"}, turn])
    message = Chat().parse(sent, {}, STAMP).request.messages[1]
    assert [block.id for block in message.blocks if isinstance(block, ToolCall)] == [""]
