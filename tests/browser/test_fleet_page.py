"""The page of the fleet in a real browser."""

import asyncio
import os
import re
import signal
import sys

import pytest
from playwright.async_api import Browser, Page, expect
from support.up import Up

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_fleet_lists_every_process(page: Page, up: Up) -> None:
    await page.goto("/")
    table = page.get_by_role("region", name="processes")
    for name in ("worker-0", "worker-1", "router-0", "indexer-0", "frontend-0"):
        await expect(table.get_by_role("row").filter(has_text=name)).to_contain_text("ready")


async def test_rows_are_sorted_and_filtered_by_keyboard(page: Page) -> None:
    await page.goto("/")
    table = page.get_by_role("region", name="processes")
    await page.get_by_label("Filter processes").press_sequentially("worker")
    await expect(table.get_by_role("row")).to_have_count(3)
    instance = table.get_by_role("columnheader", name="instance")
    await expect(instance).to_have_attribute("aria-sort", "ascending")
    await instance.get_by_role("button").press("Enter")
    await expect(instance).to_have_attribute("aria-sort", "descending")
    load = table.get_by_role("columnheader", name="running").get_by_role("button")
    await load.focus()
    await page.wait_for_function("window.was ??= document.activeElement, was.isConnected === false")
    await expect(load).to_be_focused()
    await expect(table.get_by_role("row").nth(1)).to_contain_text("worker-1")


async def test_a_worker_that_starts_shows_its_phase(page: Page, up: Up) -> None:
    await page.goto("/")
    table = page.get_by_role("region", name="processes")
    row = table.get_by_role("row").filter(has_text="late")
    token = up.token_file.read_text().strip()
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli.main", "worker", "--name", "late"),
        *("--nats", up.nats_url, "--mock-startup-s", "4", "--mock-blocks", "1500"),
        env={**os.environ, "KVMESH_NATS_TOKEN": token},
    )
    try:
        await expect(row).to_contain_text("starting: weights", timeout=20_000)
        starts = page.get_by_role("region", name="starts").get_by_role("row")
        start = starts.filter(has_text="late")
        await expect(start).to_contain_text(re.compile(r"starting.*imports [0-9.]+ s, .*…"))
        await expect(row).to_contain_text("ready", timeout=20_000)
        await expect(start).to_contain_text(re.compile(r"[0-9.]+ s.*weights [4-9][0-9.]* s, "))
        pools = page.get_by_role("region", name="pools")
        await expect(pools.get_by_role("row").filter(has_text="worker")).to_contain_text("3")
        worker.send_signal(signal.SIGTERM)
        await expect(row).to_have_count(0, timeout=20_000)
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()


@pytest.mark.usefixtures("traffic")
async def test_load_shows_within_seconds(page: Page) -> None:
    await page.goto("/")
    figures = page.locator(".figure").filter(has_text="prompt tokens/s").locator("dd")
    await expect(figures).to_have_text(re.compile(r"^[1-9]"), timeout=30_000)
    await expect(page.get_by_role("img", name="Tokens per second")).to_be_visible()


async def test_colours_follow_the_system_or_the_choice(browser: Browser, up: Up) -> None:
    context = await browser.new_context(color_scheme="dark", base_url=up.dashboard)
    page = await context.new_page()
    await page.goto("/")
    await expect(page.locator("body")).to_have_css("background-color", "rgb(18, 22, 28)")
    await page.get_by_role("button", name="Light").press("Enter")
    await expect(page.locator("body")).to_have_css("background-color", "rgb(255, 255, 255)")
    await page.reload()
    await expect(page.locator("body")).to_have_css("background-color", "rgb(255, 255, 255)")
    await context.close()


async def test_the_keyboard_reaches_the_content_first(page: Page) -> None:
    await page.goto("/")
    await page.keyboard.press("Tab")
    await expect(page.get_by_text("Skip to the content")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(re.compile("#content$"))


async def test_a_page_says_that_nats_is_frozen(page: Page, up: Up) -> None:
    await page.goto("/")
    trouble = page.get_by_role("status").first
    await expect(trouble).to_be_empty()
    nats = up.children()["nats"]
    os.kill(nats, signal.SIGSTOP)
    try:
        await expect(trouble).to_contain_text("has sent nothing for", timeout=20_000)
    finally:
        os.kill(nats, signal.SIGCONT)
    await expect(trouble).to_be_empty(timeout=20_000)


@pytest.mark.usefixtures("traffic")
async def test_a_paused_page_stands_still(page: Page) -> None:
    await page.goto("/")
    figure = page.locator(".figure").filter(has_text="prompt tokens/s").locator("dd")
    await expect(figure).to_have_text(re.compile(r"^[0-9]"))
    await page.get_by_role("button", name="Pause").press("Enter")
    await expect(page.get_by_role("button", name="Resume")).to_be_visible()
    instance = page.get_by_role("region", name="processes").get_by_role("columnheader").first
    seen = await page.locator("#content").inner_text()
    await instance.get_by_role("button").press("Enter")
    await expect(instance).to_have_attribute("aria-sort", "descending")
    await instance.get_by_role("button").press("Enter")
    await expect(instance).to_have_attribute("aria-sort", "ascending")
    assert await figure.inner_text() in seen
    await page.get_by_role("button", name="Resume").press("Enter")
    await expect(page.get_by_role("button", name="Pause")).to_be_visible()
