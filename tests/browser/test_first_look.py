"""A newcomer's first minutes: `kvmesh up`, agents at work, the pages; takes the docs' pictures."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect
from support.up import Up

pytestmark = pytest.mark.asyncio(loop_scope="session")
DEMO = (sys.executable, "-m", "kvmesh.cli.main", "replay", "demo", "--speed", "3")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def busy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    """Four workers with too little memory, and agents that have just begun."""
    up = Up(
        tmp_path_factory.mktemp("busy"),
        *("--mock-blocks", "1200", "--mock-speedup", "2"),
        dashboard=True,
    )
    up.start()
    await up.ready()
    replay = await asyncio.create_subprocess_exec(
        *(*DEMO, "--url", up.url), stdout=asyncio.subprocess.DEVNULL
    )
    yield up
    if replay.returncode is None:
        replay.terminate()
    await replay.wait()
    up.close()


async def test_agents_at_work(busy: Up, browser: Browser, pictures: Path | None) -> None:
    context = await browser.new_context(
        base_url=busy.dashboard, viewport={"width": 1280, "height": 720}
    )
    page = await context.new_page()

    async def take(name: str) -> None:
        if pictures is not None:
            whole = name == "request"
            await page.screenshot(path=pictures / f"dashboard-{name}.png", full_page=whole)

    await page.goto("/sessions")
    ended = page.get_by_text("30 of")
    await expect(ended).to_be_visible(timeout=60_000)
    await expect(page.get_by_role("img", name="Turns of sessions over time")).to_be_visible()
    await expect(page.get_by_role("region").last).to_contain_text("evicted", timeout=60_000)
    if pictures is not None:
        await page.wait_for_timeout(40_000)  # for lanes worth looking at
    await take("sessions")
    await page.goto("/")
    await expect(page.get_by_role("region", name="pools")).to_contain_text("kvmesh-demo")
    await expect(
        page.get_by_role("img", name="Tokens per second").locator("canvas")
    ).to_be_visible()
    await take("fleet")
    await page.goto("/prefixes")
    await expect(page.get_by_role("treeitem").first).to_contain_text("sessions", timeout=30_000)
    await expect(page.get_by_role("treeitem").first).to_contain_text("engine", timeout=30_000)
    await take("prefixes")
    await _open_a_loss(page)
    await expect(page.get_by_role("heading", name="Placement")).to_be_visible()
    await take("request")
    await context.close()


async def _open_a_loss(page: Page) -> None:
    """Follow the session that lost most to the turn that lost most."""
    await page.goto("/sessions")
    sessions = page.get_by_role("region").last
    lost = sessions.get_by_role("columnheader", name="lost", exact=True)
    for table in (sessions, page.get_by_role("region").last):
        lost = table.get_by_role("columnheader", name="lost", exact=True)
        while await lost.get_attribute("aria-sort") != "descending":
            await lost.get_by_role("button").click()
            await expect(lost).not_to_have_attribute("aria-sort", "none")
        await table.get_by_role("link").first.click()
        await expect(page.get_by_role("heading", level=1)).not_to_have_text("Sessions")
