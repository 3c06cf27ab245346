"""Each turn's prompt is a prefix of the next one's, in the request shape of every client."""

from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
import pytest_asyncio
from support import streams
from support.mesh import Mesh
from support.shapes import (
    ClaudeCode,
    Codex,
    Event,
    OpencodeChat,
    OpencodeMessages,
    OpencodeResponses,
    Shape,
)
from support.tap import Tap, assert_grows, shared
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")
SHAPES: list[Callable[[str], Shape]] = [
    ClaudeCode,
    Codex,
    OpencodeChat,
    OpencodeMessages,
    OpencodeResponses,
]


@pytest_asyncio.fixture(loop_scope="session")
async def tap(mesh: Mesh) -> AsyncIterator[Tap]:
    async with Tap().listening(mesh.options) as tap:
        yield tap


class Client:
    """Sends a shape's requests and passes the responses on to it."""

    def __init__(self, url: str, tap: Tap) -> None:
        self._url = url
        self._tap = tap

    async def turn(self, shape: Shape) -> list[Event]:
        """The events of the response, once the tap has the request's work, too."""
        url, seen = self._url + shape.path, len(self._tap.works)
        async with (
            aiohttp.ClientSession(headers=shape.headers) as session,
            session.post(url, json=shape.body()) as answer,
        ):
            text = await answer.text()
            assert answer.status == 200, text
        sent = streams.parse(text)
        streams.check(shape.path, sent)
        events: list[Event] = [event for event in sent if event != streams.DONE]
        shape.receive(events)
        await eventually(lambda: len(self._tap.works) > seen, what="the tap has the work")
        return events


@pytest.fixture
def client(mesh: Mesh, tap: Tap) -> Client:
    return Client(mesh.url, tap)


@pytest.mark.parametrize("make", SHAPES, ids=lambda make: make.__name__)
async def test_a_tool_loop_only_extends_its_prompt(
    client: Client, tap: Tap, make: Callable[[str], Shape]
) -> None:
    session = f"loop-{make.__name__}"
    shape = make(session)
    shape.add_user_message("How is the weather in Oslo?")
    await client.turn(shape)
    await client.turn(shape)
    shape.add_user_message("Go on, please.")
    await client.turn(shape)
    works = tap.of(session)
    assert [work.turn for work in works] == [0, 1, 2]
    assert_grows(works)
    last = tap.text(works[-1])
    assert "The weather has to be looked up.\n</think>\n\nI look it up.\n<tool_call>" in last
    assert "It is sunny in Oslo. Bye.<|im_end|>" in last
    assert session not in last


@pytest.mark.parametrize("make", SHAPES, ids=lambda make: make.__name__)
async def test_generated_tokens_are_cached_for_the_next_turn(
    client: Client, tap: Tap, make: Callable[[str], Shape]
) -> None:
    shape = make(f"cached-{make.__name__}")
    shape.add_user_message("And how is the weather in Oslo now?")
    await client.turn(shape)
    await client.turn(shape)
    before, after = tap.works
    outcome = await tap.outcome(after)
    assert outcome.cached_tokens > len(before.tokens) // 4


async def test_conversations_share_tools_and_system_prompt(client: Client, tap: Tap) -> None:
    """The billing block, which differs between an agent and its subagents, does not prevent it."""
    shapes = [ClaudeCode("one"), ClaudeCode("two"), ClaudeCode("two", "helper")]
    for shape in shapes:
        shape.add_user_message(f"Go on with {id(shape)}")
        await client.turn(shape)
    one, two, helper = tap.works
    assert (two.session, helper.session) == ("two", "two/helper")
    for other in (two, helper):
        begin = tap.text(one).index("<system-reminder>")
        assert len(tap.text(one)) - begin < 200
        assert shared(one, other) * 4 > len(one.tokens) // 2
    assert "x-anthropic-billing-header" not in tap.text(one)


async def test_a_tool_loaded_later_is_in_the_prompt_after_its_search(
    client: Client, tap: Tap
) -> None:
    shape = ClaudeCode("loading")
    shape.add_user_message("Search a tool")
    await client.turn(shape)
    shape.add_user_message("Go on")
    await client.turn(shape)
    before, after = tap.of("loading")
    assert_grows([before, after])
    assert "CronList" in [tool["name"] for tool in shape.body()["tools"]]
    assert tap.text(after).index('"name": "CronList"') > len(tap.text(before))


async def test_changed_tools_are_in_the_prompt_where_they_change(client: Client, tap: Tap) -> None:
    shape = ClaudeCode("changing")
    shape.add_user_message("Go on")
    await client.turn(shape)
    shape.add_user_message("Now with it: look at the sky")
    shape.change_tools(added="sky__get_weather", removed="Write")
    events = await client.turn(shape)
    blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [block.get("name") for block in blocks] == ["sky__get_weather"]
    before, after = tap.of("changing")
    assert_grows([before, after])
    said = tap.text(after)[len(tap.text(before)) :]
    assert "Tool Write is no longer available." in said
    assert '"name": "sky__get_weather"' in said


@pytest.mark.parametrize(
    ("prompt", "item"),
    [
        ("Patch the file", {"type": "custom_tool_call", "name": "apply_patch"}),
        ("Look at the sky", {"type": "function_call", "name": "get_weather", "namespace": "sky"}),
    ],
)
async def test_calls_of_codex_s_own_tool_types_have_their_type(
    client: Client, tap: Tap, prompt: str, item: dict[str, str]
) -> None:
    session = item["type"]
    shape = Codex(session)
    shape.add_user_message(prompt)
    events = await client.turn(shape)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert item.items() <= done[-1].items()
    shape.add_user_message("Go on")
    await client.turn(shape)
    assert_grows(tap.of(session))
