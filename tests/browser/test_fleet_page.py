"""The page of the fleet in a real browser."""

import pytest
from playwright.async_api import Page, expect
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
    await expect(table.get_by_role("row").nth(1)).to_contain_text("worker-1")
