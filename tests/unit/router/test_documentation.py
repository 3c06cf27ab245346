"""The example of a policy works, and the pages of routing name every policy and setting."""

import re
from pathlib import Path
from random import Random

import pytest
from support.routing import request, sequence, worker

from kvmesh.bus.messages import Decision, Hints, SeqFree
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.policies.registry import BUILT_IN
from kvmesh.settings.schema import RouterSettings

ROOT = Path(__file__).parents[3]
PAGES = ("routing.md", "speeds.md", "returns.md", "disaggregation.md")
PAGE = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
TEN = sequence(*range(10))


def test_the_example_policy_sticks_and_spills_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    settings = RouterSettings(policy="sticky_policy:StickyWithSpill", predicted_ttl_s=0.0)
    core = RouterCore("m", "r", settings, Random(1))
    core.join(worker("a"))
    core.join(worker("b"))

    def turn(name: str) -> Decision:
        decision = core.decide(request(name, TEN, hints=Hints(session="s")), None, 0.0)
        core.commit(decision, 0.0)
        return decision

    home = turn("0").chosen.instance
    stayed = [turn(str(number)) for number in range(1, 5)]
    assert {(d.chosen.instance, d.note) for d in stayed} == {(home, "stayed")}
    spilled = turn("5")
    assert spilled.note == "spilled over"
    assert spilled.chosen.instance != home
    for number in range(6):
        core.apply(SeqFree(str(number)), 1.0)
    assert turn("6").chosen.instance == spilled.chosen.instance
    assert not core.policies.failures


def test_every_policy_and_setting_is_documented() -> None:
    assert [name for name in BUILT_IN if f"`{name}`" not in PAGE] == []
    silent = {
        "name",
        "seed",
        "metrics_port",
    }
    fields = set(RouterSettings.__struct_fields__) - silent
    words = set(re.findall(r"[a-z_]+", PAGE.replace("no-kv-events", "kv_events")))
    assert fields - words == set()
