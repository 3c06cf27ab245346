"""The dashboard of a mesh whose callers need keys."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect
from support.up import Up
from support.wait import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")
KEY = '[[key]]\nname = "{name}"\nsha256 = "{digest}"\nscopes = {scopes}\n'


def write_keys(folder: Path, **scopes: list[str]) -> Path:
    """A keys file; each key's secret is its name."""
    file = folder / "keys.toml"
    file.write_text(
        "".join(
            KEY.format(name=name, digest=hashlib.sha256(name.encode()).hexdigest(), scopes=given)
            for name, given in scopes.items()
        )
    )
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keyed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    folder = tmp_path_factory.mktemp("keyed")
    file = write_keys(folder, root=["admin"], agent=["cache"])
    up = Up(
        folder,
        *("--workers", "1", "--frontend-keys-file", str(file)),
        dashboard=True,
    )
    up.start()
    await up.ready()
    yield up
    up.close()


async def test_a_browser_signs_in_until_its_key_is_revoked(keyed: Up, browser: Browser) -> None:
    context = await browser.new_context(base_url=keyed.dashboard)
    page = await context.new_page()
    await page.goto("/")
    await expect(page).to_have_url(f"{keyed.dashboard}/sign-in")
    await page.keyboard.type("agent")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("lacks the scope admin")
    await page.keyboard.type("root")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
    await expect(page.get_by_role("region", name="processes")).to_contain_text("worker-0")
    write_keys(keyed.folder, root=["cache"])
    await expect(page).to_have_url(f"{keyed.dashboard}/sign-in", timeout=20_000)
    write_keys(keyed.folder, root=["admin"], agent=["cache"])

    async def admitted() -> bool:
        response = await context.request.get(keyed.dashboard, headers={"x-api-key": "root"})
        return response.ok

    await eventually(admitted)
    await context.close()


async def test_signing_out_ends_the_session(keyed: Up, browser: Browser) -> None:
    context = await browser.new_context(base_url=keyed.dashboard)
    page = await context.new_page()
    await page.goto("/sign-in")
    await page.get_by_label("API key").fill("root")
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_role("button", name="Sign out").click()
    await expect(page).to_have_url(f"{keyed.dashboard}/sign-in")
    await page.goto("/")
    await expect(page).to_have_url(f"{keyed.dashboard}/sign-in")
    await context.close()


async def test_nothing_of_the_page_is_served_without_a_key(keyed: Up, browser: Browser) -> None:
    context = await browser.new_context(base_url=keyed.dashboard)
    for path, status in (
        ("/", 401),
        ("/docs", 401),
        ("/openapi.json", 401),
        ("/_nicegui_ws/socket.io/?EIO=4&transport=polling", 426),
    ):
        response = await context.request.get(path, headers={"accept": "*/*"})
        assert response.status == status, path
    await context.close()
