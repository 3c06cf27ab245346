"""The page of the fleet in a real browser."""

import asyncio
import os
import signal
import sys

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
        await expect(row).to_contain_text("starting: engine", timeout=20_000)
        await expect(row).to_contain_text("ready", timeout=20_000)
        pools = page.get_by_role("region", name="pools")
        await expect(pools.get_by_role("row").filter(has_text="worker")).to_contain_text("3")
        worker.send_signal(signal.SIGTERM)
        await expect(row).to_have_count(0, timeout=20_000)
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()
