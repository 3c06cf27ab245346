"""Last prompts of sessions: one for each conversation, bounded by bytes, found by request."""

import asyncio
from array import array
from typing import Any, Literal, cast

from msgspec.structs import replace

from kvmesh.bus.messages import PromptChange, PromptParts, Sampling, SessionPrompt, SessionQuery
from kvmesh.bus.subjects import Subjects
from kvmesh.frontend.cache_account.fingerprints import fingerprints
from kvmesh.frontend.conversation import GenerateRequest, Message, Text, Tool
from kvmesh.frontend.namespaces import scoped
from kvmesh.frontend.sessions.last_prompts import ENTRY_BYTES, PROMPTS, LastPrompts

Role = Literal["system", "user", "assistant", "tool"]


def store(limit: int = 1 << 20) -> LastPrompts:
    return LastPrompts(cast(Any, None), limit)


def prompt(request: str, conversation: int = 0, tokens: int = 4) -> SessionPrompt:
    packed = array("I", range(tokens)).tobytes()
    return SessionPrompt(packed, request=request, conversation=conversation)


def ids(prompts: LastPrompts, session: str, conversations: range) -> list[str]:
    found = (prompts.earlier("m", session, prompt("", number)) for number in conversations)
    return [p.request for p in found if p is not None]


def parts(*messages: str, tools: tuple[str, ...] = ()) -> PromptParts:
    """The parts of a conversation that begins with a system prompt."""
    roles: list[Role] = ["system"]
    for _ in messages:
        roles += ["user", "assistant"]
    spoken = [Message(role, [Text(text)]) for role, text in zip(roles, messages, strict=False)]
    offered = [Tool(name, "", {}) for name in tools]
    found = fingerprints(
        GenerateRequest(
            id="", model="m", sampling=Sampling(max_tokens=1), messages=spoken, tools=offered
        )
    )
    assert found is not None
    return found


async def test_a_frontend_alone_asks_no_other() -> None:
    prompts = LastPrompts(cast(Any, None), 1 << 20, alone=lambda: True)
    assert await prompts.find("m", "s") is None
    prompts.store("m", "s", prompt("1"))
    assert await prompts.find("m", "s") == prompt("1")


def test_a_session_has_the_last_prompt_of_each_conversation() -> None:
    prompts = store()
    prompts.store("m", "s", prompt("a", 1))
    prompts.store("m", "s", prompt("b", 2))
    first = prompts.earlier("m", "s", prompt("c", 1))
    prompts.store("m", "s", prompt("c", 1), first)
    assert ids(prompts, "s", range(1, 3)) == ["c", "b"]
    newest = prompts.newest("m", "s")
    assert newest is not None
    assert newest.request == "c"
    assert prompts.newest("other", "s") is None


def test_the_oldest_conversation_is_dropped_first() -> None:
    prompts = store()
    for number in range(PROMPTS + 2):
        prompts.store("m", "s", prompt(f"r{number}", number))
    kept = [f"r{number}" for number in range(2, PROMPTS + 2)]
    assert ids(prompts, "s", range(PROMPTS + 2)) == kept
    assert prompts.of_request("r0", "") is None


def test_side_requests_do_not_drop_the_main_conversation() -> None:
    prompts = store()
    main = replace(prompt("main", 1), parts=parts("Code.", "Begin.", "Done.", tools=("read",)))
    prompts.store("m", "s", main)
    for number in range(2, 3 * PROMPTS):
        side = replace(prompt(f"r{number}", number), parts=parts("Title.", f"Of {number}."))
        prompts.store("m", "s", side)
    assert ids(prompts, "s", range(1, 2)) == ["main"]


def test_two_conversations_that_begin_alike_are_both_stored() -> None:
    prompts, begin = store(), parts("Code.", "Begin.")
    for name, output in (("a", b"1111"), ("b", b"2222")):
        earlier = prompts.earlier("m", "s", replace(prompt(name), parts=begin))
        prompts.store("m", "s", replace(prompt(name), parts=begin), earlier)
        prompts.complete("m", "s", name, output)
    for name, output in (("a", b"1111"), ("b", b"2222")):
        longer = replace(prompt("next"), tokens=prompt("").tokens + output + b"0000")
        found = prompts.earlier("m", "s", longer)
        assert found is not None
        assert found.request == name


def test_the_prompt_with_an_edited_part_is_found_and_no_side_request() -> None:
    prompts = store()
    tools = ("read", "write")
    main = replace(prompt("main", 1), parts=parts("At 1.", "Begin.", "Done.", tools=tools))
    side = replace(prompt("title", 2), parts=parts("Title.", "Begin."))
    for each in (main, side):
        prompts.store("m", "s", each)
    edited = [
        parts("At 2.", "Begin.", "Done.", "Go on.", tools=tools),
        parts("At 1.", "Start.", "Done.", "Go on.", tools=tools),
        parts("At 1.", "Begin.", "Done.", "Go on.", tools=("read", "edit")),
    ]
    for now in edited:
        found = prompts.similar("m", "s", replace(prompt("now"), parts=now))
        assert found is not None
        assert found.request == "main"
    others = [
        parts("Explore.", "A subtask.", "Found.", "More.", tools=tools),
        parts("Summarize.", "Begin.", "Done.", "Sum it up.", tools=("remember", "forget")),
        parts("Extract.", "Other words.", "Others.", "More.", tools=tools[:1]),
    ]
    for now in others:
        assert prompts.similar("m", "s", replace(prompt("now"), parts=now)) is None
    compaction = parts("At 1.", "Begin.", "Done.", "Sum it up.")
    assert prompts.similar("m", "s", replace(prompt("now"), parts=compaction)) is None


def test_a_short_prompt_with_an_edited_part_is_found_by_its_answer() -> None:
    prompts, answer = store(), array("I", range(90, 110)).tobytes()
    main = replace(prompt("main", 1), parts=parts("At 1.", "Begin."))
    prompts.store("m", "s", main)
    prompts.complete("m", "s", "main", answer)
    now = parts("At 2.", "Begin.", "Done.", "Go on.")
    for tokens, found in ((answer + b"0000", "main"), (b"0000", None)):
        other = prompts.similar("m", "s", SessionPrompt(tokens, parts=now))
        assert (other and other.request) == found


def test_an_output_completes_the_prompt_of_its_request_alone() -> None:
    prompts = store()
    prompts.store("m", "s", prompt("a"))
    prompts.complete("m", "s", "other", b"1234")
    prompts.complete("m", "s", "a", b"12345678")
    prompts.note_change("m", "s", "a", PromptChange(token=1, part="system", way="changed"))
    found = prompts.earlier("m", "s", prompt(""))
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
    assert not asyncio.run(answers(SessionQuery("m", "s", 1, "", parts("Other.", "x")), prompts))
    older = SessionQuery("m", "s", 1)  # of a frontend without the field
    assert asyncio.run(answers(older, prompts)) == [found]


def test_a_prompt_whose_system_text_moves_is_found_by_its_tokens() -> None:
    def of(request: str, agent: int, first: int, tokens: list[int]) -> SessionPrompt:
        packed = array("I", tokens).tobytes()
        return SessionPrompt(packed, request=request, conversation=agent << 32 | first)

    prompts, long = store(), list(range(100))
    prompts.store("m", "s", of("main", 1, 7, long))
    prompts.store("m", "s", of("title", 2, 7, [*range(20), 900, 901]))
    moved = prompts.alike("m", "s", of("now", 3, 7, [900, *long[1:], 100, 101]))
    assert moved is not None
    assert moved.request == "main"
    assert prompts.alike("m", "s", of("now", 3, 8, [900, *long[1:]])) is None, "another task"
    assert prompts.alike("m", "s", of("now", 3, 7, [*range(30), *range(500, 570)])) is None
