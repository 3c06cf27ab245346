"""The planner's history as one self-contained HTML page with plots."""

import time
from collections.abc import Callable
from html import escape

import numpy as np

from kvmesh.bus.messages import ScalingDecision
from kvmesh.observer.hindsight import hindsight
from kvmesh.observer.plans import by_model, leading, sizes, worker_hours
from kvmesh.simulator.report.plots import STYLE, Line, plot


def plan_page(decisions: list[ScalingDecision]) -> str:
    """Load, forecast, fleet, kept promises and worker-hours of each model, and the decisions."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>kvmesh plan</title>",
        f"<style>{STYLE}</style><h1>kvmesh plan</h1>",
    ]
    for model, own in by_model(decisions).items():
        parts += _model(model, leading(own))
    return "\n".join(parts) + "</html>\n"


def _model(model: str, decisions: list[ScalingDecision]) -> list[str]:
    start = decisions[0].time
    minutes = np.array([(d.time - start) / 60 for d in decisions])

    def line(name: str, value: Callable[[ScalingDecision], float]) -> Line:
        return name, minutes, np.array([value(d) for d in decisions], dtype=np.float64)

    pools = list(decisions[-1].pools)
    promises = sorted({promise for d in decisions for promise in d.kept})
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(start))
    hours = worker_hours(decisions)
    return [
        f"<h2>{escape(model)}</h2><p class=note>since {since}: {hours:.2f} worker-hours ready,"
        f" {sum(d.changed for d in decisions)} changes</p>",
        "<h3>Requests per second</h3>",
        plot(
            [
                line("arrivals", lambda d: d.signals.get("arrivals_per_s", 0.0)),
                line("forecast", lambda d: d.signals.get("forecast_per_s", 0.0)),
            ],
            "minutes",
            "requests/s",
        ),
        "<h3>Workers</h3>",
        plot(
            [
                line(f"{name} {what}", lambda d, n=name, w=what: _count(d, n, w))  # type: ignore[misc]
                for name in pools
                for what in ("ready", "wanted")
            ],
            "minutes",
            "workers",
        ),
        "<h3>Share of requests that kept each promise</h3>",
        plot(
            [line(name, lambda d, n=name: d.kept.get(n, 1.0)) for name in promises],  # type: ignore[misc]
            "minutes",
            "share",
        ),
        "<h3>Changes</h3>",
        _changes(decisions),
    ]


def _count(decision: ScalingDecision, pool: str, what: str) -> float:
    found = decision.pools.get(pool)
    return float(getattr(found, what)) if found is not None else 0.0


def _changes(decisions: list[ScalingDecision]) -> str:
    rows = "".join(
        f"<tr><td>{time.strftime('%H:%M:%S', time.localtime(d.time))}</td>"
        f"<td>{escape(sizes(d))}</td>"
        f"<td>{escape(d.reason)}</td>"
        f"<td>{escape(came.text(d.signals.get('forecast_per_s', 0.0)))}</td></tr>"
        for d, came in zip(decisions, hindsight(decisions), strict=True)
        if d.changed
    )
    heads = "<th>time</th><th>workers</th><th>why</th><th>came true</th>"
    return f"<table><tr>{heads}</tr>{rows}</table>"
