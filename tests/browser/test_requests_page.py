"""The pages of requests in a real browser: tokens as they come, one request opened, odd names."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from playwright.async_api import Page, expect
from support.up import Up
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "kvmesh-demo", "messages": messages, "max_tokens": 8, **fields}


async def ask(up: Up, session: str, prompt: str = "Hello", **fields: Any) -> str:
    """The id of a completed request of a session."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(
            f"{up.url}/v1/chat/completions",
            json=body(prompt, prompt_cache_key=session, **fields),
        ) as response,
    ):
        assert response.status == 200, await response.text()
        return str((await response.json())["id"])


@asynccontextmanager
async def slow_stream(up: Up, session: str) -> AsyncIterator[None]:
    """A stream of many tokens, which the client leaves at the end."""

    async def read() -> None:
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                f"{up.url}/v1/chat/completions",
                json=body("Count.", stream=True, ignore_eos=True, max_tokens=20_000),
                headers={"x-kvmesh-session-id": session},
            ) as response,
        ):
            async for _ in response.content:
                pass

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_stream_grows_and_its_page_says_why_its_worker_was_chosen(
    page: Page, up: Up
) -> None:
    await page.goto("/requests")
    running = page.get_by_role("region", name="running requests")
    async with slow_stream(up, "slow-1"):
        row = running.get_by_role("row").filter(has_text="slow-1")
        await expect(row).to_contain_text("decode")

        async def tokens() -> int:
            return int((await row.get_by_role("cell").nth(4).inner_text()).replace(",", ""))

        first = await tokens()
        await eventually(lambda: _grown(tokens, first))
        await row.get_by_role("link").focus()
        await page.keyboard.press("Enter")
        status = page.get_by_role("main").get_by_role("status")
        await expect(status).to_contain_text("tokens so far")
        shown = await status.inner_text()
        await expect(status).not_to_have_text(shown)
        candidates = page.get_by_role("region", name="candidates")
        await expect(candidates.get_by_role("row")).to_have_count(3)
        await expect(candidates.get_by_role("row").filter(has_text="chosen")).to_have_count(1)
        reason = page.get_by_text("the best alternative").or_(page.get_by_text("same cost as"))
        await expect(reason).to_be_visible()
    await expect(status).to_contain_text("cancelled")
    parts = page.get_by_role("region", name="time by part")
    await expect(parts.get_by_role("row").filter(has_text="router's queue")).to_contain_text(
        "router-0"
    )
    await expect(parts.get_by_role("row").filter(has_text="decode")).to_contain_text("worker-")
    await page.get_by_role("link", name="slow-1").click()
    turns = page.get_by_role("region", name="turns")
    await expect(turns.get_by_role("row")).to_have_count(2)


async def _grown(tokens: Any, first: int) -> bool:
    return bool(await tokens() > first)


async def test_ended_requests_are_filtered_and_opened_by_keyboard(page: Page, up: Up) -> None:
    request = await ask(up, "keyboard-1", "A prompt that no other test sends. " * 20)
    await page.goto("/requests")
    await page.get_by_label("Filter ended requests").focus()
    await page.keyboard.type("keyboard-1")
    rows = page.get_by_role("region", name="ended requests").get_by_role("row")
    await expect(rows).to_have_count(2)
    link = rows.get_by_role("link", name=request)
    for _ in range(40):
        await page.keyboard.press("Tab")
        if await link.evaluate("e => e === document.activeElement"):
            break
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", level=1)).to_have_text("Request")
    await expect(page.get_by_text("reused 0 of")).to_be_visible()


async def test_an_unknown_id_names_the_command_that_reads_the_stream(page: Page) -> None:
    await page.goto("/request?id=chatcmpl-gone")
    await expect(page.get_by_role("main").get_by_role("status")).to_contain_text(
        "kvmesh explain chatcmpl-gone"
    )
    await page.goto("/request")
    await expect(page.get_by_role("main").get_by_role("status")).to_contain_text("explain ID")


HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "{{ 7*7 }}",
    "'\"><script>alert(2)</script>",
    "\u202eright to left",
    "a\x1b[31m\x1fb",
    "n" * 500,
)


@pytest.mark.parametrize("name", HOSTILE)
async def test_names_that_callers_choose_are_shown_as_text(page: Page, up: Up, name: str) -> None:
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    request = await ask(up, name)
    await ask(up, name)
    shown = name.replace("\x1f", "").replace("\x1b", "\\x1b")[:40]
    await page.goto("/requests")
    await page.get_by_label("Filter ended requests").fill(request)
    rows = page.get_by_role("region", name="ended requests").get_by_role("row")
    await expect(rows).to_have_count(2)
    await expect(rows.nth(1)).to_contain_text(shown)
    await page.goto(f"/request?id={request}")
    await page.get_by_role("main").get_by_role("link").first.click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Session")
    await expect(page.get_by_role("main")).to_contain_text(shown)
    await expect(page.get_by_role("region", name="turns").get_by_role("row")).to_have_count(3)
    await page.goto("/sessions")
    sessions = page.get_by_role("region", name="sessions")
    await page.get_by_label("Filter sessions").fill(shown)
    await expect(sessions.get_by_role("row").nth(1)).to_contain_text(shown)
    await expect(page.locator("main img")).to_have_count(0)
    assert dialogs == []


async def test_hostile_addresses_are_shown_as_text(page: Page) -> None:
    for name in ("<img src=x onerror=alert(1)>", "{{ 7*7 }}", "x" * 10_000, "%00\ud7ff"):
        await page.goto(f"/request?id={quote(name)}")
        await expect(page.get_by_role("main")).to_contain_text(name[:100])
        await page.goto(f"/session?tenant={quote(name)}&name={quote(name)}")
        await expect(page.get_by_role("main")).to_contain_text(name[:100])
        await expect(page.locator("main img")).to_have_count(0)


async def test_the_tables_fit_a_laptop(page: Page, up: Up) -> None:
    """With a value in every column that has one, long names of models and sessions included."""
    wide = """() => [...document.querySelectorAll('.q-table__middle')]
        .map(table => table.scrollWidth - table.clientWidth)"""
    await ask(up, "an-agent-with-a-long-name-of-its-session-0123456789abcdef", "Long. " * 4000)
    async with slow_stream(up, "another-session-with-a-name-that-is-rather-long"):
        await page.goto("/requests")
        running = page.get_by_role("region", name="running requests").get_by_role("row")
        await expect(running.filter(has_text="another-session")).to_be_visible()
        ended = page.get_by_role("region", name="ended requests").get_by_role("row")
        await expect(ended.filter(has_text="an-agent-with")).to_be_visible()
        assert await page.evaluate(wide) == [0, 0]
