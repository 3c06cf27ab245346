"""The prompts of an agent's sessions begin with what they share; the texts are made up."""

import json
from typing import Any

import pytest
from multidict import CIMultiDict
from support.stamp import STAMP
from unit.frontend.preprocess.test_preprocessor import served

from kvmesh.frontend.apis.messages.api import Messages
from kvmesh.frontend.conversation import CacheControl, Message, Text, ToolNotice
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.frontend.preprocess.preprocessor import Preprocessor
from kvmesh.frontend.preprocess.shared_prefix import HEAD, MAX_CHARS, shared_prefix

RULES = "You work on code.\n\n# Harness\n - Speak plainly.\n - Paths look like `file:line`.\n\n"
LATER = "# Context management\nOld text is summed up.\n"
SKILLS = "The following skills are available here:\n\n- tidy: Tidy up. Run `/tidy`."


def memory(folder: str) -> str:
    fenced = "```markdown\n# a heading inside of a fence\n```"
    return f"# Memory\n\nNotes are kept at `{folder}/memory/`.\n\n{fenced}\n\nRead them.\n\n"


def start(folder: str) -> str:
    environment = f"# Environment\nYou run here:\n - Primary working directory: {folder}\n"
    return f"{environment}\n\n{SKILLS}\n\nToday's date is 2026-01-02."


def session(folder: str, *prompts: str) -> list[Message]:
    """The messages of a session in a folder, with one turn for each prompt."""
    system = Message("system", [Text("You are an agent."), Text(RULES + memory(folder) + LATER)])
    status = Text(f"<system-reminder>\nCurrent branch: {folder}\n</system-reminder>")
    messages = [
        system,
        Message("user", [status, Text(prompts[0])]),
        Message("system", [Text(start(folder))]),
    ]
    for prompt in prompts[1:]:
        messages += [Message("assistant", [Text("Done.")]), Message("user", [Text(prompt)])]
    return messages


def texts(message: Message) -> list[str]:
    return [block.text for block in message.blocks if isinstance(block, Text)]


def test_what_all_sessions_share_comes_first() -> None:
    system, first = shared_prefix(session("/home/one/a", "Tidy up"))
    assert texts(system) == ["You are an agent.", RULES + LATER]
    constant, local, status, prompt = texts(first)
    assert SKILLS in constant
    assert "/home/one" not in constant
    assert constant.startswith(HEAD)
    order = [local.index(t) for t in ("# Memory", "Read them.", "# Environment", "Today's date")]
    assert order == sorted(order)
    assert "/home/one/a/memory/" in local
    assert (status.startswith("<system-reminder>"), prompt) == (True, "Tidy up")
    other = shared_prefix(session("/srv/two/b", "Now another prompt"))
    assert other[0] == system
    assert texts(other[1])[0] == constant


def test_no_text_is_lost_or_doubled() -> None:
    before = session("/home/one/a", "Mend it", "Go on")
    after = "".join(text for message in shared_prefix(before) for text in texts(message))
    for part in (RULES, LATER, SKILLS, memory("/home/one/a").strip(), "Today's date", "Mend it"):
        assert after.count(part) == 1, part


def test_later_turns_extend_earlier_ones() -> None:
    one = shared_prefix(session("/home/one/a", "Tidy up"))
    two = shared_prefix(session("/home/one/a", "Tidy up", "Go on"))
    assert list(two[: len(one)]) == list(one)
    assert two[len(one) :] == session("/home/one/a", "Tidy up", "Go on")[3:]


def test_messages_are_arranged_once() -> None:
    once = shared_prefix(session("/home/one/a", "Tidy up", "Go on"))
    assert shared_prefix(once) is once


def test_the_mark_behind_the_first_message_moves_to_its_end() -> None:
    messages = session("/home/one/a", "Tidy up")
    mark = CacheControl(300.0)
    messages[2] = Message("system", [Text(start("/home/one/a"), mark)])
    marks = [block.cache for block in shared_prefix(messages)[1].blocks]  # type: ignore[union-attr]
    assert marks == [None, None, None, mark]
    unmarked = shared_prefix(session("/home/one/a", "Tidy up"))
    assert [texts(m) for m in shared_prefix(messages)] == [texts(m) for m in unmarked]


@pytest.mark.parametrize(
    "heading", ["Environment", "auto memory", "Scratchpad Directory", "gitStatus"]
)
@pytest.mark.parametrize("text", ["Use /tmp/here/it.", "Files: C:\\Users\\me", "Branch: main"])
def test_sections_of_a_folder_move(heading: str, text: str) -> None:
    messages = [
        Message("system", [Text(f"{RULES}# {heading}\n{text}\n{LATER}")]),
        Message("user", [Text("Hi")]),
    ]
    system, first = shared_prefix(messages)
    assert texts(system) == [RULES + LATER]
    assert (text in texts(first)[0], texts(first)[1:]) == (True, ["Hi"])


def test_the_state_of_a_repository_moves() -> None:
    messages = [
        Message("system", [Text(RULES), Text("gitStatus: as of now\n\nCurrent branch: main")]),
        Message("user", [Text("Hi")]),
    ]
    system, first = shared_prefix(messages)
    assert texts(system) == [RULES]
    assert "Current branch" in texts(first)[0]


USER = Message("user", [Text("Hi")])
SYSTEM = Message("system", [Text(RULES)])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [SYSTEM],
        [USER],
        [SYSTEM, USER],
        [SYSTEM, Message("user", [])],
        [SYSTEM, Message("assistant", [Text("x")]), USER],
        [SYSTEM, USER, Message("system", [Text("Tool results may be wrong.")])],
        [SYSTEM, USER, Message("system", [Text(SKILLS), ToolNotice("read")])],
        [SYSTEM, USER, Message("assistant", [Text("x")]), Message("system", [Text(SKILLS)])],
        [Message("system", [Text("# Environment\nModels are called m1 and m2. Use /fast.")]), USER],
        [Message("system", [Text("# Rules\nNever touch /etc/passwd/x.")]), USER],
        [Message("system", [Text("Text\n```\n# Memory\nat /a/b/\n```\n")]), USER],
        [Message("system", [Text(memory("/a/b") + "x" * MAX_CHARS)]), USER],
    ],
)
def test_messages_of_another_shape_stay_as_they_are(messages: list[Message]) -> None:
    assert shared_prefix(messages) is messages


# --- in the frontend ---

CLAUDE = {"user-agent": "claude-cli/2.1 (external, cli)"}
TOOLS = [
    {"name": f"tool{n}", "description": "Do things. " * 20, "input_schema": {"type": "object"}}
    for n in range(5)
]


def request(folder: str, agent: dict[str, str]) -> Any:
    sent = {
        "model": "m",
        "tools": TOOLS,
        "system": RULES + memory(folder) + LATER,
        "messages": [
            {"role": "user", "content": "Tidy up"},
            {"role": "system", "content": start(folder)},
        ],
    }
    return Messages().parse(json.dumps(sent).encode(), CIMultiDict(agent), STAMP).request


async def shared(share: bool, agent: dict[str, str]) -> float:
    """The share of a prompt that it has in common with one in another folder."""
    preprocessor = Preprocessor(1 << 20, TenantNamespaces(), share_prefixes=share)
    made = [
        (await preprocessor.prepare(request(folder, agent), served(8192), None)).prompts[0].tokens
        for folder in ("/home/one/a", "/srv/two/b")
    ]
    counted = await preprocessor.count(request("/home/one/a", agent), served(8192))
    assert counted == made[:1]
    common = next(i for i, (a, b) in enumerate(zip(*made, strict=False)) if a != b)
    return common / len(made[1])


async def test_claude_code_shares_tools_and_skills_across_folders() -> None:
    assert await shared(True, CLAUDE) > 0.7
    assert await shared(False, CLAUDE) < 0.2


async def test_other_agents_prompts_stay_as_they_are() -> None:
    assert await shared(True, {"user-agent": "opencode/1.0"}) < 0.2
