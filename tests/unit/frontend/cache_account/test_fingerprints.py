"""Fingerprints of a prompt's parts."""

from unit.frontend.cache_account.edits import request

from kvmesh.frontend.cache_account.fingerprints import continued, fingerprints
from kvmesh.frontend.conversation import Message, Text, Thinking, Tool

TOOLS = [Tool("read", "Reads.", {})]
BEGIN = [Message("system", [Text("Be brief.")]), Message("user", [Text("hi")])]
ANSWER = Message("assistant", [Thinking("A greeting."), Text("Hello.")])
MORE = Message("user", [Text("Go on.")])


def test_a_prompt_that_continues_another_has_its_parts_and_more() -> None:
    earlier = fingerprints(request(BEGIN, TOOLS))
    assert earlier is not None
    for messages in (BEGIN, [*BEGIN, ANSWER], [*BEGIN, ANSWER, MORE]):
        later = request(messages, TOOLS)
        assert continued(later, earlier) == fingerprints(later)


def test_parts_are_found_anew_where_messages_are_cut_otherwise() -> None:
    earlier = fingerprints(request([*BEGIN, ANSWER], TOOLS))
    assert earlier is not None
    parts = [Message("assistant", [block]) for block in ANSWER.blocks]
    assert continued(request([*BEGIN, *parts, MORE], TOOLS), earlier) is None
    assert continued(request(BEGIN, TOOLS), earlier) is None
