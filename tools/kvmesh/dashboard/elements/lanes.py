"""Lanes of sessions over time: a bar for each turn, coloured by its share cached."""

import json
import time
from collections.abc import Sequence
from typing import Any

from nicegui import events, ui

from kvmesh.dashboard.elements.charts import TEXT
from kvmesh.dashboard.elements.links import request_href
from kvmesh.dashboard.state.lane_bars import RUNNING, SHARES, TurnBar, lane_bars, turn_text
from kvmesh.dashboard.state.requests.seen import SeenRequest
from kvmesh.runtime.logs import printable

LANE_REM = 1.7
# from orange to blue, which all kinds of colour-blind people tell apart; on both backgrounds
RAMP = ("#C44E00", "#E69F00", "#9A9A8C", "#56B4E9", "#0072B2")
GREY = "#8884"
LOST = "#D81B60"
# JavaScript, which draws one item: a bar, a bar that still grows, or the line of a gap.
# Values are lane, start, end, shade, lost.
DRAW = f"""(params, api) => {{
  const box = params.coordSys, lane = api.value(0), shade = api.value(3);
  const from = api.coord([api.value(1), lane]), to = api.coord([api.value(2), lane]);
  const x = Math.max(from[0], box.x), right = Math.min(to[0], box.x + box.width);
  if (right < box.x || x > box.x + box.width) return;
  const width = Math.max(right - x, 2), y = from[1];
  const height = Math.min(api.size([0, 1])[1] * 0.62, 20);
  if (shade === null || Number.isNaN(shade)) return {{
    type: 'rect', silent: true, shape: {{x, y: y - 0.5, width, height: 1}},
    style: {{fill: '{TEXT}'}}}};
  const fill = shade >= 0 ? {list(RAMP)}[shade] : '{GREY}';
  const bar = {{type: 'rect', shape: {{x, y: y - height / 2, width, height, r: 2}}, style: {{
    fill, stroke: '{TEXT}', lineWidth: shade >= 0 ? 0.6 : 1.2,
    lineDash: shade === {RUNNING} ? [4, 3] : null}}}};
  const children = [bar];
  if (api.value(4)) children.push({{type: 'polygon', style: {{
    fill: '{LOST}', stroke: '#fff', lineWidth: 0.8}}, shape: {{points: [
    [x - 5, y - height / 2 - 5], [x + 5, y - height / 2 - 5], [x, y - height / 2 + 4]]}}}});
  return {{type: 'group', children}};
}}"""
# JavaScript, which shows the text about a bar, as text, and asks the server for it once
TIP = """(item) => {
  const lanes = getElement(ID), request = item.data.request;
  const tip = document.createElement('div');
  tip.className = 'tip';
  tip.textContent = lanes.tip && lanes.tip.request === request ? lanes.tip.text : '…';
  if (!lanes.asked || lanes.asked.request !== request) {
    lanes.asked = {request, index: item.dataIndex};
    lanes.$emit('tip', request);
  }
  return tip;
}"""
TIP_STYLE = "background: var(--panel); color: var(--ink); border-color: var(--line)"
SHOW_TIP = """
const lanes = getElement(ID), tip = TIP;
lanes.tip = tip;
if (lanes.asked && lanes.asked.request === tip.request)
  lanes.chart.dispatchAction({type: 'showTip', seriesIndex: 1, dataIndex: lanes.asked.index});
"""


class LaneChart:
    """The lanes; a click on a bar opens its request. The tables of the page have the same data.

    The chart stands still while the pointer is on it.
    """

    def __init__(self, title: str) -> None:
        _legend()
        self._chart = ui.echart(_options(title), on_point_click=_open).classes("lanes")
        self._chart.props(f'role="img" aria-label="{title}"')
        self._chart.options["tooltip"][":formatter"] = TIP.replace("ID", str(self._chart.id))
        self._chart.on("tip", self._on_tip)
        self._chart.on("mouseenter", lambda: self._hold(True), [])
        self._chart.on("mouseleave", lambda: self._hold(False), [])
        self._lanes: Sequence[Sequence[SeenRequest]] = ()
        self._held = False

    def draw(
        self, names: Sequence[str], lanes: Sequence[Sequence[SeenRequest]], since: float, now: float
    ) -> None:
        """Draw the turns of each lane between two Unix times."""
        if self._held:
            return
        self._lanes = lanes
        bars, gaps = lane_bars(lanes, since, now)
        options = self._chart.options
        options["yAxis"]["data"] = [printable(name)[:60] or " " for name in names]
        options["xAxis"] |= {"min": round(1000 * since), "max": round(1000 * now)}
        options["series"][0]["data"] = [
            {"value": [gap.lane, round(1000 * gap.start), round(1000 * gap.end), None, 0]}
            for gap in gaps
        ]
        options["series"][1]["data"] = [_item(bar) for bar in bars]
        self._chart.style(f"height: {LANE_REM * max(len(names), 1) + 3:.1f}rem")
        self._chart.update()

    def _hold(self, held: bool) -> None:
        self._held = held

    def _on_tip(self, event: events.GenericEventArguments) -> None:
        for turns in self._lanes:
            for turn in turns:
                if turn.request == event.args:
                    tip = {"request": turn.request, "text": turn_text(turn, turns, time.time())}
                    script = SHOW_TIP.replace("ID", str(self._chart.id), 1)
                    ui.run_javascript(script.replace("TIP", json.dumps(tip), 1))
                    return


def _item(bar: TurnBar) -> dict[str, Any]:
    times = round(1000 * bar.start), round(1000 * bar.end)
    return {"value": [bar.lane, *times, bar.shade, int(bar.lost)], "request": bar.request}


def _open(event: events.EChartPointClickEventArguments) -> None:
    data: Any = event.data
    request = data.get("request") if isinstance(data, dict) else None
    if isinstance(request, str):
        ui.navigate.to(request_href(request))


def _legend() -> None:
    steps = [f"{100 * n // SHARES} to {100 * (n + 1) // SHARES} %" for n in range(SHARES)]
    with ui.element("ul").classes("legend").props('aria-label="Colours of the lanes"'):
        with ui.element("li"):
            ui.label("share of the prompt cached:")
        for text, colour in zip(steps, RAMP, strict=True):
            swatch(text, colour)
        swatch("not counted", GREY)
        swatch("runs", "transparent", "border-style: dashed")
        swatch(
            "a tenth of the prompt lost, or more", LOST, "clip-path: polygon(0 0, 100% 0, 50% 100%)"
        )
        swatch("between turns (tools)", TEXT, "height: 1px; border: 0")


def swatch(text: str, colour: str, style: str = "") -> None:
    """An entry of a legend."""
    with ui.element("li"):
        ui.element("span").classes("swatch").style(f"background: {colour}; {style}")
        ui.label(text)


def _options(title: str) -> dict[str, Any]:
    series = {
        "type": "custom",
        ":renderItem": DRAW,
        "encode": {"x": [1, 2], "y": 0},
        "clip": True,
        "data": [],
    }
    return {
        "aria": {"enabled": True, "label": {"description": title}},
        "animation": False,
        "grid": {"left": 8, "right": 12, "top": 8, "bottom": 8, "containLabel": True},
        "tooltip": {
            "trigger": "item",
            "confine": True,
            "transitionDuration": 0,
            "extraCssText": TIP_STYLE,
        },
        "xAxis": {
            "type": "time",
            "position": "top",
            "axisLabel": {"color": TEXT, "hideOverlap": True},
            "splitLine": {"show": True, "lineStyle": {"color": "#8884"}},
        },
        "yAxis": {
            "type": "category",
            "inverse": True,
            "data": [],
            "axisTick": {"show": False},
            "axisLabel": {"color": TEXT, "width": 150, "overflow": "truncate", "interval": 0},
        },
        "series": [{**series, "silent": True}, {**series}],
    }
