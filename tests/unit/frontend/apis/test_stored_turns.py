"""Turns of the Responses API as they are stored."""

from typing import Any

import msgspec
import pytest
from support.stamp import STAMP

from kvmesh.frontend.apis.base import AnswerSummary, Usage
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.apis.sealed_reasoning import seal
from kvmesh.frontend.errors import InvalidRequest


def test_sealed_thinking_is_bounded_for_a_whole_request() -> None:
    item = {"type": "reasoning", "encrypted_content": seal("0" * (9 << 20))}
    assert len(item["encrypted_content"]) < 100_000
    user = {"type": "message", "role": "user", "content": "x"}
    call = Responses().parse(msgspec.json.encode({"model": "m", "input": [item, user]}), {}, STAMP)
    assert len(call.request.messages) == 2
    with pytest.raises(InvalidRequest) as error:
        Responses().parse(msgspec.json.encode({"model": "m", "input": [item, item]}), {}, STAMP)
    assert error.value.param == "input[1].encrypted_content"


def stored(**fields: Any) -> tuple[Any, Any]:
    """The parsed call, and what it would store."""
    body = msgspec.json.encode({"model": "m", **fields})
    call = Responses().parse(body, {}, STAMP)
    assert call.thread is not None
    usage = Usage(prompt=1, cached=0, stored=0, output=1)
    return call, call.thread.turn(call.renderer.whole(AnswerSummary(usage)))


def test_only_input_that_a_prompt_can_hold_is_stored() -> None:
    shown = {"type": "message", "role": "user", "content": "Hi", "id": "msg_1"}
    padding = {"padding": "x" * 100_000}
    _, turn = stored(input=[{**shown, **padding}, {"type": "ghost_snapshot", **padding}])
    assert [msgspec.json.decode(item) for item in turn.input] == [shown]


def test_a_response_that_is_not_stored_has_store_false() -> None:
    call, turn = stored(input="Hi")
    assert msgspec.json.decode(turn.response)["store"] is True
    call.thread.mark_unstored()
    usage = Usage(prompt=1, cached=0, stored=0, output=1)
    assert msgspec.json.decode(call.renderer.whole(AnswerSummary(usage)))["store"] is False
