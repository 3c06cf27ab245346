"""Keys of conversations, and the names of sessions that no client names."""

from collections.abc import Sequence
from typing import Literal

import pytest
from msgspec.structs import replace

from kvmesh.bus.messages import Hints, Sampling
from kvmesh.frontend.conversation import GenerateRequest, Message, Text, Tool
from kvmesh.frontend.namespaces import own_name
from kvmesh.frontend.preprocess.conversation_key import conversation_key, inferred_session

Role = Literal["system", "user", "assistant", "tool"]


def request(
    *texts: str, tools: Sequence[str] = (), agent: str = "openai-sdk", tenant: str = ""
) -> GenerateRequest:
    """A conversation that begins with a system prompt."""
    roles: list[Role] = ["system"]
    for _ in texts:
        roles += ["user", "assistant"]
    made = GenerateRequest(
        id="r",
        model="m",
        sampling=Sampling(max_tokens=1),
        messages=[Message(role, [Text(text)]) for role, text in zip(roles, texts, strict=False)],
        tools=[Tool(name, "", {}) for name in tools],
        agent=agent,
        cache_salt=tenant,
    )
    made.hints = replace(Hints(), conversation=conversation_key(made))
    return made


def test_the_turns_of_a_conversation_have_one_name_and_its_agent() -> None:
    texts = ("Code.", "Begin.", "Done.", "Go on.")
    names = {
        inferred_session(request(*texts[:count], tools=["read"], agent="qwen-code"))
        for count in range(2, 5)
    }
    (name,) = names
    assert name is not None
    agent, _, number = own_name(name).partition(" ")
    assert (agent, len(number)) == ("qwen-code", 8)


def test_side_requests_and_other_tenants_have_other_names() -> None:
    main = ("Code.", "Begin.", "Done.")
    found = [
        request(*main, tools=["read"]),
        request(*main, tools=["remember"]),
        request("Write a commit message.", "Begin.", "Done.", tools=["read"]),
        request("Code.", "Another task.", "Done.", tools=["read"]),
        request(*main, tools=["read"], tenant="team"),
    ]
    assert len(set(map(inferred_session, found))) == len(found)


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (request("Be brief.", "Begin."), False),
        (request("Be brief.", "Begin.", agent="other"), False),
        (request("Be brief.", "Begin.", agent=""), False),
        (request("Be brief.", "Begin.", agent="aider"), True),
        (request("Be brief.", "Begin.", tools=["read"], agent="other"), True),
        (request("Be brief.", "Begin.", "Done.", "Go on.", agent="other"), True),
        (request(), False),
    ],
)
def test_a_single_request_of_no_agent_has_no_session(made: GenerateRequest, named: bool) -> None:
    assert (inferred_session(made) is not None) == named
