"""Connectors by name, their needs, and the one that only advises."""

import sys
from pathlib import Path
from typing import cast

import pytest

from kvmesh.bus.client import Bus
from kvmesh.planner.connectors.advisory import AdvisoryConnector
from kvmesh.planner.connectors.bucket import BucketConnector
from kvmesh.planner.connectors.command import CommandConnector
from kvmesh.planner.connectors.compose import ComposeConnector
from kvmesh.planner.connectors.interface import Connector
from kvmesh.planner.connectors.kubernetes import KubernetesConnector
from kvmesh.planner.connectors.registry import create_connector
from kvmesh.planner.core.pools import Pool
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.settings.schema import PlannerSettings

NO_BUS = cast(Bus, None)  # no connector uses it before it opens


def created(settings: PlannerSettings) -> Connector:
    return create_connector(settings, NO_BUS, [Pool("a")])


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (PlannerSettings(), AdvisoryConnector),
        (PlannerSettings(connector="bucket"), BucketConnector),
        (PlannerSettings(connector="processes"), BucketConnector),
        (PlannerSettings(connector="command", command="fleet"), CommandConnector),
        (PlannerSettings(connector="compose", compose_file=Path("c.yaml")), ComposeConnector),
        (PlannerSettings(connector="kubernetes"), KubernetesConnector),
    ],
)
def test_the_settings_name_the_connector(settings: PlannerSettings, kind: type) -> None:
    assert type(created(settings)) is kind


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (PlannerSettings(connector="command"), "needs planner.command"),
        (PlannerSettings(connector="compose"), "needs planner.compose_file"),
    ],
)
def test_a_missing_setting_is_named(settings: PlannerSettings, reason: str) -> None:
    with pytest.raises(PlannerConfigError, match=reason):
        created(settings)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("kubernetes_asyncio")]:
        monkeypatch.delitem(sys.modules, module)
    for module in ("kubernetes", "kubernetes_api"):
        monkeypatch.delitem(sys.modules, f"kvmesh.planner.connectors.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(PlannerConfigError, match="needs the extra kubernetes"):
        created(PlannerSettings(connector="kubernetes"))


async def test_advice_is_logged_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    connector = AdvisoryConnector()
    await connector.open()
    await connector.scale({"a": 2, "b": 1})
    await connector.scale({"a": 2, "b": 1})
    await connector.scale({"a": 1, "b": 1}, stop=["w-1", "w-2"])
    assert caplog.messages == [
        "would run 2 workers of pool a, 1 workers of pool b",
        "would run 1 workers of pool a; would stop w-1, w-2 first",
    ]
    assert await connector.state() == {}
    await connector.close()
