"""Last prompts of sessions: one for each conversation, bounded by bytes, found by request."""

import asyncio
from array import array
from typing import Any, cast

from kvmesh.bus.messages import PromptChange, SessionPrompt, SessionQuery
from kvmesh.bus.subjects import Subjects
from kvmesh.frontend.namespaces import scoped
from kvmesh.frontend.sessions.last_prompts import CONVERSATIONS, ENTRY_BYTES, LastPrompts


def store(limit: int = 1 << 20) -> LastPrompts:
    return LastPrompts(cast(Any, None), limit)


def prompt(request: str, conversation: int = 0, tokens: int = 4) -> SessionPrompt:
    packed = array("I", range(tokens)).tobytes()
    return SessionPrompt(packed, request=request, conversation=conversation)


def ids(prompts: LastPrompts, session: str, conversations: range) -> list[str]:
    found = (prompts.earlier("m", session, conversation) for conversation in conversations)
    return [p.request for p in found if p is not None]


def test_a_session_has_the_last_prompt_of_each_conversation() -> None:
    prompts = store()
    prompts.store("m", "s", prompt("a", 1))
    prompts.store("m", "s", prompt("b", 2))
    prompts.store("m", "s", prompt("c", 1))
    assert ids(prompts, "s", range(1, 3)) == ["c", "b"]
    newest = prompts.newest("m", "s")
    assert newest is not None
    assert newest.request == "c"
    assert prompts.newest("other", "s") is None


def test_the_oldest_conversation_is_dropped_first() -> None:
    prompts = store()
    for number in range(CONVERSATIONS + 2):
        prompts.store("m", "s", prompt(f"r{number}", number))
    kept = [f"r{number}" for number in range(2, CONVERSATIONS + 2)]
    assert ids(prompts, "s", range(CONVERSATIONS + 2)) == kept
    assert prompts.of_request("r0", "") is None


def test_an_output_completes_the_prompt_of_its_request_alone() -> None:
    prompts = store()
    prompts.store("m", "s", prompt("a"))
    prompts.complete("m", "s", "other", b"1234")
    prompts.complete("m", "s", "a", b"12345678")
    prompts.note_change("m", "s", "a", PromptChange(token=1, part="system", way="changed"))
    found = prompts.earlier("m", "s", 0)
    assert found is not None
    assert (found.output, found.done) == (b"12345678", True)
    assert found.change is not None


def test_only_its_owner_finds_a_prompt_by_its_request() -> None:
    prompts, session = store(), scoped("team", "s")
    prompts.store("m", session, prompt("a"))
    found = prompts.of_request("a", "team")
    assert found is not None
    assert (found[0], found[1].request) == ("m", "a")
    assert prompts.of_request("a", "other") is None
    assert prompts.of_request("b", "team") is None


def test_the_owner_with_the_most_bytes_loses_its_oldest_session() -> None:
    prompts = store(6 * (ENTRY_BYTES + 16))
    for number in range(5):
        prompts.store("m", scoped("big", f"s{number}"), prompt(f"big{number}"))
    prompts.store("m", scoped("small", "s"), prompt("small"))
    prompts.store("m", scoped("big", "s5"), prompt("big5"))
    assert prompts.of_request("big0", "big") is None
    assert prompts.of_request("small", "small") is not None
    assert prompts.of_request("big5", "big") is not None


async def answers(query: SessionQuery, prompts: LastPrompts) -> list[SessionPrompt]:
    """The replies of a frontend to a query."""
    bus = QueriedBus()
    prompts._bus = cast(Any, bus)
    await prompts.open()
    found: list[SessionPrompt] = []
    bus.handler(query, found.append)
    return found


class QueriedBus:
    """A bus that has the handler of queries called."""

    subjects = Subjects("mesh")
    handler: Any = None

    async def serve(self, _subject: str, _decoder: object, handler: object) -> None:
        self.handler = handler


def test_a_request_does_not_find_itself_as_the_earlier_one() -> None:
    prompts = store()
    prompts.store("m", "s", prompt("own", 1))
    assert not asyncio.run(answers(SessionQuery("m", "s", 1, request="own"), prompts))
    (found,) = asyncio.run(answers(SessionQuery("m", "s", 1, request="another"), prompts))
    assert found.request == "own"
    older = SessionQuery("m", "s", 1)  # of a frontend without the field
    assert asyncio.run(answers(older, prompts)) == [found]
