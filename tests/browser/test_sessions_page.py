"""The pages of sessions in a real browser: the lanes, and a turn that lost its cached tokens."""

from secrets import token_hex

import aiohttp
import pytest
from playwright.async_api import Locator, Page, expect
from support.up import Up
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")
LANES = "Turns of sessions over time"
HAS_BOTH_TURNS = """(element) => {
  const chart = getElement(+element.id.slice(1)).chart;
  return !!chart && chart.getOption().series[1].data.length === 2;
}"""
# the middle of the last bar of the first lane, in pixels
LAST_BAR = """(element) => {
  const chart = getElement(+element.id.slice(1)).chart;
  const [lane, from, to] = chart.getOption().series[1].data.at(-1).value;
  const [x, y] = chart.convertToPixel({seriesIndex: 1}, [from, lane]);
  return [(x + chart.convertToPixel({seriesIndex: 1}, [to, lane])[0]) / 2, y];
}"""


def own_name(kind: str) -> str:
    """A session that no earlier run of the test has used."""
    return f"{kind}-{token_hex(4)}"


async def turn(up: Up, session: str, clock: str, questions: int, tokens: int = 8) -> None:
    """One turn of an agent whose system prompt has the time in it."""
    messages = [{"role": "system", "content": f"It is {clock}. " + "Help with the code. " * 60}]
    messages += [{"role": "user", "content": f"Question {n}."} for n in range(questions)]
    async with (
        aiohttp.ClientSession() as client,
        client.post(
            f"{up.url}/v1/chat/completions",
            json={
                "model": "kvmesh-demo",
                "messages": messages,
                "max_tokens": tokens,
                "ignore_eos": True,
            },
            headers={"x-kvmesh-session-id": session, "x-tenant-id": "team-a"},
        ) as response,
    ):
        assert response.status == 200, await response.text()
        await response.read()


async def test_a_turn_that_lost_its_cache_is_found_with_the_reason(page: Page, up: Up) -> None:
    name = own_name("moving")
    for number, clock in enumerate(("12:00", "12:00", "12:01")):
        await turn(up, name, clock, number + 1)
    await page.goto("/sessions")
    await expect(page.get_by_role("img", name=LANES)).to_be_visible()
    await page.get_by_label("Filter sessions").fill(name)
    rows = page.get_by_role("region", name="sessions").get_by_role("row")
    await expect(rows).to_have_count(2)  # a click on a row that is replaced has no effect
    row = rows.nth(1)
    await expect(row).to_contain_text("diverged")
    await expect(row).to_contain_text("system prompt changed")
    await row.get_by_role("link").click()
    await expect(page.get_by_role("main")).to_contain_text(f"{name} of tenant team-a")
    await expect(page.get_by_role("main")).to_contain_text(f"session {name}: 3 requests")
    turns = page.get_by_role("region", name="turns").get_by_role("row")
    await expect(turns).to_have_count(4)
    last = turns.nth(1)
    await expect(last).to_contain_text("after a change of the prompt; system prompt changed")
    await last.get_by_role("link").click()
    await expect(page.get_by_text("tokens, which were computed again")).to_be_visible()
    await page.get_by_role("link", name="chatcmpl-").first.click()  # the turn before it
    await expect(page.get_by_role("main").get_by_role("status")).to_contain_text("Ended at")


async def test_a_turn_tells_its_losses_under_the_pointer(page: Page, up: Up) -> None:
    name = own_name("pointed")
    await turn(up, f"<i>{name}</i>", "12:00", 1)
    await turn(up, f"<i>{name}</i>", "12:01", 1, tokens=3000)  # a bar that is wide enough
    await page.goto("/sessions")
    await page.get_by_label("Session or tenant").fill(name)
    status = page.get_by_role("main").get_by_role("status")
    await expect(status).to_have_text("1 to 1 of 1 sessions")
    lanes = page.get_by_role("img", name=LANES)
    await eventually(lambda: lanes.evaluate(HAS_BOTH_TURNS))

    async def pointed() -> bool:
        # the chart stands still once the server knows of the pointer; until then the bar moves
        await page.mouse.move(*await _place(lanes))
        return "after a change of the prompt" in await lanes.inner_text()

    await eventually(pointed)
    await expect(lanes).to_contain_text("turn 2: chatcmpl-")
    await page.mouse.click(*await _place(lanes))
    await expect(page.get_by_role("heading", level=1)).to_have_text("Request")


async def _place(lanes: Locator) -> tuple[float, float]:
    """The place of the last bar on the page."""
    box = await lanes.bounding_box()
    assert box is not None
    x, y = await lanes.evaluate(LAST_BAR)
    return box["x"] + x, box["y"] + y


async def test_lanes_are_filtered_and_their_window_chosen_by_keyboard(page: Page, up: Up) -> None:
    name = own_name("lane")
    await turn(up, name, "12:00", 1)
    await page.goto("/sessions")
    status = page.get_by_role("main").get_by_role("status")
    await expect(status).to_contain_text("sessions")
    await page.get_by_label("Session or tenant").focus()
    await page.keyboard.type(name)
    await expect(status).to_have_text("1 to 1 of 1 sessions")
    await page.get_by_label("Session or tenant").fill("no such session")
    await expect(status).to_have_text("No session had a turn in this window.")
    window = page.get_by_role("combobox", name="Window")
    await window.focus()
    await page.keyboard.press("Enter")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("5 minutes", exact=True).first).to_be_visible()


async def test_an_unknown_session_names_the_command_that_reads_the_stream(page: Page) -> None:
    await page.goto("/session?tenant=&name=gone")
    await expect(page.get_by_role("main")).to_contain_text("kvmesh explain --session")
