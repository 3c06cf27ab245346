"""The rules and boards in compose/ name exported metrics, and each alert has its remedy."""

import re
import subprocess
from itertools import chain
from pathlib import Path

import pytest
import yaml
from support.prometheus import NAME, RULES, panels, program, rules

from kvmesh.cli.references.metrics import entries, sources

RUNBOOK = Path(__file__).parents[2] / "docs" / "runbook.md"
SAME = "the same in each"
SUFFIX = re.compile(r"_(bucket|sum|count)$")


def test_promtool_accepts_the_rules() -> None:
    promtool = program("promtool")
    if promtool is None:
        pytest.skip("no promtool: install Debian's package prometheus")
    checked = subprocess.run(
        [promtool, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_rules_and_boards_query_exported_metrics() -> None:
    exported = {entry.name for source in sources().values() for entry in entries(source)}
    known = exported | rules("record").keys() | {"up"}
    expressions = chain(rules("record").values(), rules("alert").values(), panels().values())
    named = {name for expression in expressions for name in NAME.findall(expression)}
    assert {name for name in named if name not in known and SUFFIX.sub("", name) not in known} == (
        set()
    )


def test_series_that_every_router_exports_alike_are_not_added_up() -> None:
    same = {e.name for source in sources().values() for e in entries(source) if SAME in e.text}
    assert "kvmesh_router_queue_requests" in same
    for expression in (*rules("record").values(), *rules("alert").values(), *panels().values()):
        for name in same.intersection(NAME.findall(expression)):
            assert re.search(rf"max by \([a-z, ]+\) \({name}\)", expression), expression


def test_no_query_hides_that_its_series_is_missing() -> None:
    expressions = [*rules("record").values(), *rules("alert").values(), *panels().values()]
    assert not [each for each in expressions if "vector(" in each or "absent(" in each]


def test_each_alert_has_a_section_of_the_runbook() -> None:
    sections = re.findall(r"^## (\w+)\n\n.+\n\n- Look: `.+`\.\n- Do: .+", RUNBOOK.read_text(), re.M)
    assert sections == list(rules("alert"))
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    for alert in alerts:
        assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
