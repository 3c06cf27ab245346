"""The page of prefixes in a real browser: shared runs, their holders, evictions, hostile names."""

import json
from urllib.request import Request, urlopen

import pytest
from playwright.async_api import Locator, Page, expect
from support.up import Up
from support.wait import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")
MODEL = "kvmesh-demo"
HOSTILE = "<img src=x onerror=\"document.title='taken'\">{{ 7*7 }} \u202eabc\u200f \x1f"
SEEN_MS = 1000 * PATIENCE_S


def post(up: Up, path: str, tenant: str, body: dict[str, object]) -> None:
    headers = {"Content-Type": "application/json", "x-tenant-id": tenant}
    with urlopen(Request(up.url + path, json.dumps(body).encode(), headers), timeout=PATIENCE_S):
        pass


def complete(up: Up, tenant: str, system: str, session: str) -> None:
    """Complete a prompt of some 20 blocks with a system prompt."""
    messages = [
        {"role": "system", "content": f"{system} " * 40},
        {"role": "user", "content": f"{session} " * 40},
    ]
    nvext = {"session_control": {"session_id": session}}
    body = {"model": MODEL, "max_tokens": 4, "messages": messages, "nvext": nvext}
    post(up, "/v1/chat/completions", tenant, body)


def node(page: Page, *sessions: str) -> Locator:
    """The outermost node of the tree with all of these sessions below it."""
    found = page.locator(".q-tree__node")
    for session in sessions:
        found = found.filter(has_text=session)
    return found.first


async def test_sessions_share_a_node_that_a_worker_holds_until_it_is_cleared(
    page: Page, up: Up
) -> None:
    for session in ("ada", "ben"):
        complete(up, "tree-tenant", "Review programs with care.", session)
    await page.goto("/prefixes")
    shared = node(page, "ada", "ben").get_by_role("treeitem").first
    await expect(shared).to_contain_text("2 sessions", timeout=SEEN_MS)
    await expect(shared).to_contain_text("of tree-tenant")
    await expect(shared).to_contain_text("engine")
    await shared.click()
    detail = page.get_by_role("region", name="chosen prefix")
    await expect(detail).to_contain_text("2 sessions of tree-tenant")
    ada = detail.get_by_role("link", name="ada")
    await expect(ada).to_have_attribute("href", "/session?tenant=tree-tenant&name=ada")
    holders = detail.get_by_role("region", name="holders")
    await expect(holders.get_by_role("row").nth(1)).to_contain_text("worker-")
    await expect(holders.get_by_role("row").nth(1)).to_contain_text("100.0%")
    post(up, "/v1/cache/clear", "tree-tenant", {"model": MODEL})
    await expect(shared).to_contain_text("held by nobody", timeout=SEEN_MS)
    await expect(holders).to_contain_text("no holders")
    complete(up, "tree-tenant", "Review programs with care.", "ada")
    await expect(shared).not_to_contain_text("held by nobody", timeout=SEEN_MS)


async def test_the_tree_is_used_by_keyboard(page: Page, up: Up) -> None:
    for session in ("cleo", "dan"):
        complete(up, "key-tenant", "Explain one proof at a time.", session)
    await page.goto("/prefixes")
    shared = page.get_by_role("treeitem").filter(has_text="of key-tenant").first
    await expect(shared).to_have_attribute("aria-expanded", "true", timeout=SEEN_MS)
    await shared.focus()
    await page.keyboard.press("Space")
    await expect(shared).to_have_attribute("aria-expanded", "false")
    await page.keyboard.press("Space")
    await expect(shared).to_have_attribute("aria-expanded", "true")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    detail = page.get_by_role("region", name="chosen prefix")
    await expect(detail).to_contain_text("of key-tenant")
    await expect(detail.get_by_role("heading")).not_to_contain_text("2 sessions")


async def test_a_hostile_session_name_is_text(page: Page, up: Up) -> None:
    complete(up, "odd-tenant", "Name things well.", HOSTILE)
    await page.goto("/prefixes")
    item = page.get_by_role("treeitem").filter(has_text="of odd-tenant").first
    await expect(item).to_contain_text("<img src=x onerror=", timeout=SEEN_MS)
    await expect(item).to_contain_text("{{ 7*7 }}")
    await item.click()
    detail = page.get_by_role("region", name="chosen prefix")
    await expect(detail.get_by_role("heading")).to_contain_text("{{ 7*7 }}")
    assert await page.locator("main img").count() == 0
    assert await page.title() == "Prefixes · kvmesh"
