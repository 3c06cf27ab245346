"""Charts of Apache ECharts, which NiceGUI includes, in the colours of either theme."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from nicegui import ui

# Okabe and Ito's palette: distinct for colour-blind people, and on both backgrounds
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C8C8C")
TEXT = "#7f8a97"  # legible on both backgrounds


class TimedSample(Protocol):
    """Anything that was measured at a time, in Unix seconds."""

    @property
    def time(self) -> float: ...


S = TypeVar("S", bound=TimedSample)


def lines(title: str, names: Sequence[str], unit: str = "", *, share: bool = False) -> ui.echart:
    """A chart of lines over time, one for each name; `draw` fills it. `share`: from 0 to 100 %."""
    value_axis: dict[str, Any] = {
        "type": "value",
        "name": unit,
        "min": 0,
        "splitLine": {"lineStyle": {"color": "#8884"}},
        "axisLabel": {"color": TEXT},
    }
    if share:
        value_axis |= {"max": 100, "axisLabel": {"color": TEXT, "formatter": "{value} %"}}
    options = {
        "aria": {"enabled": True, "label": {"description": title}},
        "animation": False,
        "color": list(COLOURS),
        "title": {"text": title, "left": 0, "textStyle": {"fontSize": 13, "color": TEXT}},
        "legend": {
            "top": 0,
            "right": 0,
            "icon": "roundRect",
            "itemWidth": 12,
            "itemHeight": 4,
            "textStyle": {"color": TEXT},
            "data": list(names),
        },
        "grid": {"left": 8, "right": 24, "top": 34, "bottom": 8, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True},
        "xAxis": {
            "type": "time",
            "axisLabel": {"color": TEXT, "hideOverlap": True, "alignMaxLabel": "right"},
        },
        "yAxis": value_axis,
        "series": [{"type": "line", "name": n, "showSymbol": False, "data": []} for n in names],
    }
    chart = ui.echart(options).classes("chart").props('role="img"')
    chart.props["aria-label"] = title  # not parsed, since others choose the names in it
    return chart


def draw(chart: ui.echart, samples: Sequence[S], *values: Callable[[S], float | None]) -> None:
    """Set the points of each line to its value in each sample; `time` is in Unix seconds."""
    times = [round(1000 * sample.time) for sample in samples]
    for drawn, value in zip(chart.options["series"], values, strict=True):
        points = (_rounded(value(sample)) for sample in samples)
        drawn["data"] = [list(point) for point in zip(times, points, strict=True)]
    chart.update()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
