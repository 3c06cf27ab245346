"""Comparisons with another policy in a real browser."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect
from support.nats import free_port
from support.up import Up
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")
REQUESTS = 12
LONG_MS = 120_000.0  # a simulating process starts, beside other load
SLOW_MS = 30_000.0


@pytest.fixture(scope="module")
def served(up: Up) -> Up:
    """The mesh, with requests that share prompts."""
    for number in range(REQUESTS):
        up.complete(prompt="All begin with these words. " * 20 + f"This is {number % 4}.")
    return up


@pytest_asyncio.fixture(loop_scope="session")
async def hasty(served: Up, tmp_path: Path) -> AsyncIterator[str]:
    """The address of a dashboard whose simulations may take hardly any time."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "kvmesh.cli.main", "dashboard", "--port", str(port)),
        *("--nats", served.nats_url, "--nats-token-file", str(served.token_file)),
        *("--whatif-s", "0.05"),
    ]
    process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path)
    address = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        try:
            with urlopen(f"{address}/health", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    await eventually(serves)
    yield address
    process.terminate()
    await process.wait()


async def compare(page: Page) -> None:
    await expect(page.get_by_label("Model")).to_have_value(re.compile("."))
    await page.get_by_role("button", name="Compare").press("Enter")


async def cells(page: Page, figure: str) -> list[str]:
    table = page.get_by_role("region", name="comparison")
    row = table.get_by_role("row").filter(has=page.get_by_text(figure, exact=True))
    return await row.get_by_role("cell").all_inner_texts()


async def test_requests_are_compared_under_another_policy(page: Page, served: Up) -> None:
    await page.goto("/whatif")
    await expect(page.get_by_text("Nothing in the mesh changes")).to_be_visible()
    policy = page.get_by_role("combobox", name="Policy")
    await policy.focus()
    await page.keyboard.press("ArrowDown")
    await page.get_by_role("option", name="round-robin", exact=True).click()
    await compare(page)
    table = page.get_by_role("region", name="comparison")
    await expect(table).to_be_visible(timeout=LONG_MS)
    await expect(table).to_contain_text("present, simulated (kv)")
    await expect(table).to_contain_text("chosen, simulated (round-robin)")
    name, measured, present, chosen, _ = await cells(page, "requests")
    assert name == "requests"
    assert int(measured) == int(present) == int(chosen) >= REQUESTS
    shares = await cells(page, "cached share of prompt tokens")
    assert all(each.endswith("%") for each in shares[1:4])
    assert (await cells(page, "workers that served any"))[3] == "2"
    await expect(page.get_by_text("set router.policy to round-robin")).to_be_visible()


async def test_the_named_command_shows_the_same_figures(
    page: Page, served: Up, tmp_path: Path
) -> None:
    await page.goto("/whatif?policy=least-loaded")
    await page.get_by_label("Workers", exact=True).fill("3")
    await page.get_by_label("Blocks per worker").fill("64")
    await compare(page)
    await expect(page.get_by_role("region", name="comparison")).to_be_visible(timeout=LONG_MS)
    _, command = await page.get_by_text("kvmesh simulate live --").all_inner_texts()
    file = tmp_path / "figures.json"
    words = [*command.split()[1:], "--json", str(file)]
    words += ["--nats-token-file", str(served.token_file)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli.main", *words), stdout=asyncio.subprocess.PIPE
    )
    await process.communicate()
    [run] = json.loads(file.read_text())
    assert run["policy"] == "least-loaded"
    assert len(run["workers"]) == 3
    chosen = [(await cells(page, figure))[3] for figure in ("requests", "TTFT p50")]
    assert chosen == [f"{run['rounds']}", f"{1000 * run['latency']['ttft_s']['p50']:,.1f} ms"]


async def test_the_form_is_used_by_keyboard_alone(page: Page, served: Up) -> None:
    await page.goto("/whatif")
    model = page.get_by_role("combobox", name="Model")
    await expect(page.get_by_label("Model")).to_have_value(re.compile("."))
    await model.focus()
    await page.keyboard.press("Tab")
    await page.keyboard.press("ArrowDown")
    await expect(page.get_by_role("option", name="the last 5 minutes")).to_be_visible()
    await page.keyboard.press("ArrowUp")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("combobox", name="Requests of")).to_have_value(
        "the last 5 minutes"
    )
    for _ in range(5):
        await page.keyboard.press("Tab")
    await expect(page.get_by_role("button", name="Compare")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("region", name="comparison")).to_be_visible(timeout=LONG_MS)


async def test_a_time_without_requests_is_reported(page: Page, served: Up) -> None:
    await page.goto("/whatif")
    await page.get_by_role("combobox", name="Requests of").click()
    await page.get_by_role("option", name="from").click()
    await compare(page)
    await expect(page.get_by_text("must end after it begins")).to_be_visible()
    await page.get_by_label("From").fill("2020-01-01T10:00:00")
    await page.get_by_label("To", exact=True).fill("2020-01-01T11:00:00")
    await page.get_by_role("button", name="Compare").click()
    await expect(page.get_by_text("keeps requests for 1d00h")).to_be_visible()
    ago = "new Date(Date.now() - MS - 60000 * new Date().getTimezoneOffset())"
    for field, ms in (("From", "7200000"), ("To", "7100000")):
        at = await page.evaluate(f"{ago.replace('MS', ms)}.toISOString().slice(0, 19)")
        await page.get_by_label(field, exact=True).fill(at)
    await page.get_by_role("button", name="Compare").click()
    await expect(page.get_by_text("no finished requests in this window")).to_be_visible(
        timeout=LONG_MS
    )


async def test_a_comparison_is_cancelled(page: Page, served: Up) -> None:
    await page.goto("/whatif")
    await compare(page)
    await page.get_by_role("button", name="Cancel").click()
    await expect(page.get_by_text("Cancelled.")).to_be_visible()
    await expect(page.get_by_role("button", name="Compare")).to_be_enabled()
    await expect(page.get_by_role("region", name="comparison")).to_have_count(0)


async def test_a_simulation_that_takes_too_long_is_ended(hasty: str, page: Page) -> None:
    await page.goto(f"{hasty}/whatif")
    await compare(page)
    text = "The simulation took longer than 0.05 s (dashboard.whatif_s)"
    await expect(page.get_by_text(text)).to_be_visible(timeout=SLOW_MS)
    await expect(page.get_by_role("button", name="Compare")).to_be_enabled()
