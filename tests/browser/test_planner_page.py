"""The planner's decisions in a real browser; the test publishes them as planners do."""

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect
from support.up import Up

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import FleetCandidate, PoolPlan, ScalingDecision, encode

pytestmark = pytest.mark.asyncio(loop_scope="session")
TTFT = "ttft p95=2s"
MODEL = "kvmesh-demo"


@pytest_asyncio.fixture(loop_scope="session")
async def bus(up: Up) -> AsyncIterator[Bus]:
    bus = await Bus.connect(up.options, "test")
    yield bus
    await bus.close()


def decision(
    ago_s: float, before: int, wanted: int, *, planner: str = "planner-0.a", model: str = MODEL
) -> ScalingDecision:
    fleets = [
        FleetCandidate(
            workers={"workers": count},
            cost=float(count),
            shares={TTFT: min(0.6 + count / 10, 1.0)},
            quantiles={TTFT: 4.0 / max(count, 1)},
            busy=0.9 / max(count, 1),
        )
        for count in (wanted - 1, wanted)
    ]
    return ScalingDecision(
        model=model,
        time=time.time() - ago_s,
        planner=planner,
        reason=f"workers {before} → {wanted}: too few keep {TTFT}"
        if wanted != before
        else "all promises are kept",
        changed=wanted != before,
        pools={
            "workers": PoolPlan(
                ready=before, starting=wanted - before, before=before, wanted=wanted,
                startup_s=60.0, step_times="fit", samples=40,
            )
        },
        signals={
            "arrivals_per_s": 1.0 + wanted,
            "forecast_per_s": 1.5 + wanted,
            "waiting_requests": 3.0,
        },
        kept={TTFT: 0.9},
        candidates=fleets,
        unreachable=["itl p95=0.001s"],
        cost=float(wanted),
        connector="processes",
    )  # fmt: skip


async def publish(bus: Bus, *decisions: ScalingDecision) -> None:
    for each in decisions:
        await bus.store(bus.subjects.scaling(each.model), encode(each), 10.0)


async def test_without_a_planner_the_page_names_how_to_run_one(page: Page) -> None:
    await page.goto("/planner")
    await expect(page.get_by_text("kvmesh up --planner")).to_be_visible()
    await expect(page.get_by_role("region", name="decisions")).to_be_hidden()


async def test_decisions_appear_as_they_are_made(page: Page, bus: Bus) -> None:
    await page.goto("/planner")
    history = [decision(1200 - 60 * n, 1 + n // 6, 1 + n // 6 + (n % 6 == 5)) for n in range(18)]
    twin = decision(400, 7, 9, planner="planner-1.b")
    await publish(bus, *history[::-1], twin, history[3])
    table = page.get_by_role("region", name="decisions")
    await expect(table.get_by_role("row").filter(has_text="workers 1 → 2")).to_have_count(1)
    await expect(table.get_by_role("row").filter(has_text="another planner led")).to_have_count(1)
    await expect(page.get_by_role("img", name="Workers of pool workers")).to_be_visible()
    await expect(page.get_by_text("No planner runs")).to_be_visible()
    await page.get_by_label("Also decisions that change no pool").press("Space")
    await expect(table.get_by_role("row")).to_have_count(1 + len(history) + 1)


async def test_a_decision_shows_the_fleets_that_were_considered(page: Page, bus: Bus) -> None:
    await publish(bus, decision(2, 4, 5))
    await page.goto("/planner")
    row = page.get_by_role("region", name="decisions").get_by_role("row")
    link = row.filter(has_text="workers 4 → 5").get_by_role("link")
    await expect(link).to_be_visible()  # a table that changes takes the focus away
    await link.press("Enter")
    fleets = page.get_by_role("region", name="fleets considered")
    await expect(fleets.get_by_role("row").filter(has_text="chosen")).to_contain_text("workers 5")
    await expect(fleets.get_by_role("row").filter(has_text="workers 4")).to_contain_text(
        "100.0% (1 s)"
    )
    promises = page.get_by_role("region", name="promises")
    await expect(promises).to_contain_text("no worker can keep it")


async def test_one_of_several_models_is_chosen(page: Page, bus: Bus) -> None:
    await publish(bus, decision(1, 2, 3, model="other"))
    await page.goto("/planner?model=other")
    table = page.get_by_role("region", name="decisions")
    await expect(table.get_by_role("row").filter(has_text="workers 2 → 3")).to_have_count(1)
    await page.get_by_label("Model").click()
    await page.get_by_role("option", name=MODEL).click()
    await expect(table.get_by_role("row").filter(has_text="workers 4 → 5")).to_have_count(1)


async def test_a_decision_of_long_ago_is_not_found(page: Page) -> None:
    await page.goto("/decision?model=kvmesh-demo&time=1.0&planner=x")
    await expect(page.get_by_text("holds no such decision")).to_be_visible()
