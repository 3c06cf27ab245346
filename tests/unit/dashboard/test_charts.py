"""Charts, whose names others choose."""

import pytest

pytest.importorskip("nicegui")

from nicegui import Client
from nicegui.page import page

from kvmesh.dashboard.elements import charts


async def test_a_name_in_a_title_sets_no_other_property() -> None:
    """NiceGUI parses properties, and evaluates those with a colon as JavaScript."""
    title = 'Workers of pool a" :x="alert(1)" onclick="alert(1)'
    with Client(page("/chart"), request=None):
        chart = charts.lines(title, ("ready",))
    assert chart.props["aria-label"] == title
    assert not {":x", "onclick"} & set(chart.props)
