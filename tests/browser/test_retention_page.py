"""The page of retention in a real browser: pins by tenant, losses, KV memory by tier."""

import json
from urllib.request import Request, urlopen

import pytest
from playwright.async_api import Page, expect
from support.up import Up
from support.wait import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")
PINS = "/v1/cache/pins"
SEEN_MS = 1000 * PATIENCE_S


def call(up: Up, method: str, path: str, body: dict[str, object] | None = None) -> None:
    """Call the API as the tenant pin-tenant."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "x-tenant-id": "pin-tenant"}
    request = Request(up.url + path, data, headers, method=method)
    with urlopen(request, timeout=PATIENCE_S):
        pass


async def test_a_pin_is_shown_under_its_tenant_until_it_is_deleted(page: Page, up: Up) -> None:
    prompt = {
        "model": "kvmesh-demo",
        "messages": [{"role": "user", "content": "Keep this for later. " * 30}],
    }
    await page.goto("/retention")
    pins = page.get_by_role("region", name="pins")
    pin = pins.get_by_role("row").filter(has_text="later {b} <b>x")
    call(up, "POST", PINS, {**prompt, "id": "later {b} <b>x", "ttl": "10m", "priority": 90})
    await expect(pin).to_contain_text("(tag ", timeout=SEEN_MS)  # no session has told its name
    session = {"session_control": {"session_id": "keeper"}}
    call(up, "POST", "/v1/chat/completions", {**prompt, "max_tokens": 4, "nvext": session})
    await expect(pin).to_contain_text("pin-tenant", timeout=SEEN_MS)
    await expect(pin).to_contain_text("90")
    tenant = (
        page.get_by_role("region", name="tenants").get_by_role("row").filter(has_text="pin-tenant")
    )
    await expect(tenant.get_by_role("cell").nth(5)).to_have_text("1")
    call(up, "DELETE", f"{PINS}/later%20%7Bb%7D%20%3Cb%3Ex")
    await expect(pin).to_have_count(0, timeout=SEEN_MS)
    await expect(tenant.get_by_role("cell").nth(5)).to_have_text("0")


async def test_kv_memory_is_listed_by_tier(page: Page) -> None:
    for path in ("/retention", "/"):
        await page.goto(path)
        tiers = page.get_by_role("region", name="tiers")
        engines = tiers.get_by_role("row").filter(has_text="engine memory")
        await expect(engines).to_contain_text("3,000", timeout=SEEN_MS)


async def test_the_filter_of_tenants_is_reached_by_keyboard(page: Page) -> None:
    await page.goto("/retention")
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")
    await expect(page.get_by_label("Filter tenants")).to_be_focused()
    await page.keyboard.type("no such tenant")
    tenants = page.get_by_role("region", name="tenants")
    await expect(tenants).to_contain_text("no tenants", timeout=SEEN_MS)
