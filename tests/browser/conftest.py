"""A mesh under `kvmesh up` with its dashboard, and Debian's Chromium to look at it."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, ViewportSize, async_playwright, expect
from support.up import Up
from support.wait import PATIENCE_S

CHROMIUM = shutil.which("chromium") or ""
LAPTOP = ViewportSize(width=1280, height=800)
expect.set_options(timeout=1000 * PATIENCE_S)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder without a browser; `make browser` installs one."""
    if CHROMIUM:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no Chromium: apt install chromium"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    """A mesh of two mock workers with small caches, which lose what is not used."""
    up = Up(
        tmp_path_factory.mktemp("up"),
        *("--workers", "2", "--mock-speedup", "20", "--mock-blocks", "1500"),
        dashboard=True,
    )
    up.start()
    await up.ready()
    yield up
    up.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def traffic(up: Up) -> AsyncIterator[None]:
    """Agents at work on the mesh, as `kvmesh replay demo` generates them."""
    replay = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli.main", "replay", "demo", "--url", up.url),
        *("--speed", "4"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    yield
    if replay.returncode is None:
        replay.terminate()
    await replay.wait()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox"] if os.getuid() == 0 else [],
        )
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, up: Up) -> AsyncIterator[Page]:
    """A fresh laptop-sized page; its errors fail the test."""
    context = await browser.new_context(viewport=LAPTOP, base_url=up.dashboard)
    page = await context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    yield page
    await context.close()
    assert errors == []


@pytest.fixture(scope="session")
def pictures() -> Path | None:
    """The folder that screenshots go to: KVMESH_PICTURES, none without it."""
    folder = os.environ.get("KVMESH_PICTURES")
    return Path(folder) if folder else None
