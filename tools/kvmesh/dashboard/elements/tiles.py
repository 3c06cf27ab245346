"""One tile for each worker, coloured by its load: a thousand of them fit on a screen."""

import math
from html import escape
from typing import Any

from nicegui import ui

from kvmesh.dashboard.elements.charts import TEXT
from kvmesh.observer.fleet import FleetRow

MOST_TILES = 4000
MOST_NAMED = 16  # of which each tile has the name
TILES_WIDTH = 290  # pixels of the chart in the narrowest window that has four beside each other
# from light to dark of one hue: its order is clear without colours, too
RAMP = ("#cfe3f5", "#6baed6", "#2171b5", "#08306b")
MARKS = {"draining": "#E69F00", "silent": "#D55E00", "incompatible": "#D55E00"}


class Tiles:
    """The tiles; their order is that of the workers' names."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._chart = (
            ui.echart(_options(title)).classes("chart").props(f'role="img" aria-label="{title}"')
        )

    def draw(self, rows: list[FleetRow]) -> None:
        """Draw the workers among the rows, MOST_TILES of them."""
        workers = sorted(
            (row for row in rows if row.kv_used is not None), key=lambda row: row.instance
        )
        shown = workers[:MOST_TILES]
        wide = max(1, math.ceil(math.sqrt(3 * len(shown))))
        high = max(1, math.ceil(len(shown) / wide))
        options = self._chart.options
        options["title"]["text"] = (
            self.title if len(shown) == len(workers) else f"{self.title} (the first {MOST_TILES:,})"
        )
        options["xAxis"]["data"] = list(range(wide))
        options["yAxis"]["data"] = list(range(high))
        options["series"][0]["data"] = [
            _tile(n % wide, n // wide, row) for n, row in enumerate(shown)
        ]
        few = len(shown) <= MOST_NAMED
        options["series"][0]["label"] |= {"show": few, "width": TILES_WIDTH / wide - 8}
        self._chart.update()


def _tile(x: int, y: int, row: FleetRow) -> dict[str, Any]:
    share = round(100 * (row.kv_used or 0.0), 1)
    tile: dict[str, Any] = {
        "value": [x, y, share],
        "name": row.instance,
        "tooltip": {
            "formatter": f"{escape(row.instance)}: {row.state}, {row.running} running,"
            f" {row.waiting} waiting<br>KV blocks in use: {share} %"
        },
    }
    tile["label"] = {"color": "#fff" if share > 40 else "#111"}
    if row.state in MARKS:
        tile["itemStyle"] = {"borderColor": MARKS[row.state], "borderWidth": 3}
    return tile


def _options(title: str) -> dict[str, Any]:
    axis = {"type": "category", "show": False, "data": []}
    return {
        "aria": {"enabled": True, "label": {"description": title}},
        "animation": False,
        "title": {"text": title, "left": 0, "textStyle": {"fontSize": 13, "color": TEXT}},
        "grid": {"left": 4, "right": 4, "top": 30, "bottom": 34},
        "tooltip": {"confine": True},
        "xAxis": axis,
        "yAxis": {**axis, "inverse": True},
        "visualMap": {
            "min": 0,
            "max": 100,
            "calculable": False,
            "orient": "horizontal",
            "left": "center",
            "bottom": 0,
            "itemHeight": 120,
            "itemWidth": 10,
            "text": ["100 %", "0 %"],
            "textStyle": {"color": TEXT},
            "inRange": {"color": list(RAMP)},
        },
        "series": [
            {
                "type": "heatmap",
                "data": [],
                "itemStyle": {"borderWidth": 1, "borderColor": "#8886"},
                "label": {
                    "show": False,
                    "formatter": "{b}",
                    "fontSize": 10,
                    "lineHeight": 12,
                    "overflow": "break",
                },
                "progressive": 0,
            }
        ],
    }
