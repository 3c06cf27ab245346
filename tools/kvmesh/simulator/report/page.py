"""Report of several runs as one self-contained HTML page with SVG plots."""

from collections.abc import Sequence
from html import escape

import numpy as np

from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.records import Column, WorkerRecord
from kvmesh.simulator.report.figures import Figures
from kvmesh.simulator.report.tables import ROWS, notes

COLOURS = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c", "#0891b2", "#a16207", "#be185d")
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 290, 46, 24
POINTS = 1200
STYLE = """
:root{color-scheme:light dark;--ink:light-dark(#1c1c1e,#e8e8ea);--soft:light-dark(#6b6b70,#9a9aa0);
--line:light-dark(#e3e3e6,#37373b);--band:light-dark(#f6f6f8,#222226)}
body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2.5rem auto;padding:0 1rem;
color:var(--ink);background:light-dark(#fff,#161618)}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin:2.2rem 0 .4rem}h3{font-size:.95rem;margin:1rem 0 0}
table{border-collapse:collapse;width:100%}td,th{padding:.2rem .8rem;text-align:right;
font-variant-numeric:tabular-nums}td:first-child{text-align:left;color:var(--soft)}
th{border-bottom:1px solid var(--soft)}tr:nth-child(even){background:var(--band)}
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
svg .grid{stroke:var(--line)}.key,.note{margin:0;font-size:.85rem}
.key span{margin-right:1.2rem;white-space:nowrap}
.key i{display:inline-block;width:1.1rem;height:.2rem;margin-right:.4rem;vertical-align:middle}
.key em{float:right;color:var(--soft);font-style:normal}
"""
Line = tuple[str, Column, Column]


def page(title: str, runs: Sequence[tuple[Simulation, Figures]]) -> str:
    """The HTML report of one or more runs of the same workload."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>",
        f"<style>{STYLE}</style><h1>{escape(title)}</h1>",
        _table([figures for _, figures in runs]),
        *(f"<p class=note>{escape(note)}</p>" for _, figures in runs for note in notes(figures)),
        "<h2>Time to first token</h2>",
        _plot([_ttft(s, f) for s, f in runs], "seconds", "share of requests", log_x=True),
        "<h2>Cached share of prompt tokens over time</h2>",
        _plot([_hits(s, f) for s, f in runs], "virtual seconds", "cached share"),
        "<h2>Sequences running on each worker</h2>",
    ]
    for simulation, figures in runs:
        workers = list(simulation.worker_records.values())
        drawn = workers[: len(COLOURS)]
        extent = f", the first {len(drawn)} of {len(workers)} workers" if drawn != workers else ""
        parts.append(f"<h3>{escape(figures.policy)}{extent}</h3>")
        parts.append(_plot(_running(drawn), "virtual seconds", "sequences"))
    return "\n".join(parts) + "</html>\n"


def _table(runs: Sequence[Figures]) -> str:
    head = "".join(f"<th>{escape(run.policy)}</th>" for run in runs)
    rows = (
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell(run))}</td>' for run in runs)}"
        for name, cell in ROWS
    )
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _ttft(simulation: Simulation, figures: Figures) -> Line:
    records = simulation.records
    values = records.column("first_token") - records.column("arrived")
    values = np.sort(values[~np.isnan(values)])
    shares = np.linspace(0, 1, len(values)) if len(values) else values
    return figures.policy, np.maximum(values, 1e-3), shares


def _hits(simulation: Simulation, figures: Figures, bins: int = 60) -> Line:
    records = simulation.records
    arrived = records.column("arrived")
    tokens = np.array([r.input_tokens for r in simulation.workload.rounds], dtype=np.float64)
    edges = np.linspace(arrived.min(), arrived.max() + 1e-9, bins + 1)
    bin_index = np.clip(np.digitize(arrived, edges) - 1, 0, bins - 1)
    served = np.array([error is None for error in records.error], dtype=np.float64)
    sent = np.bincount(bin_index, tokens * served, bins)
    cached = np.bincount(bin_index, records.column("cached") * served, bins)
    used = sent > 0
    return figures.policy, edges[:-1][used], cached[used] / sent[used]


def _running(workers: Sequence[WorkerRecord]) -> list[Line]:
    return [
        (
            record.name,
            np.array([s.time for s in record.samples]),
            np.array([s.running for s in record.samples], dtype=np.float64),
        )
        for record in workers
    ]


def _plot(lines: Sequence[Line], x_name: str, y_name: str, log_x: bool = False) -> str:
    lines = [line for line in lines if len(line[1])]
    if not lines:
        return "<p>no data</p>"
    scale = np.log10 if log_x else np.asarray
    low = min(float(scale(x).min()) for _, x, _ in lines)
    high = max(float(scale(x).max()) for _, x, _ in lines)
    top = max(float(y.max()) for _, _, y in lines) or 1.0
    span = max(high - low, 1e-9)
    width, height = WIDTH - LEFT - 10, HEIGHT - BOTTOM - 24

    def at(x: float, y: float) -> str:
        return f"{LEFT + (x - low) / span * width:.1f},{24 + (1 - y / top) * height:.1f}"

    parts = [_key([name for name, _, _ in lines], f"{y_name} over {x_name}")]
    parts += [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img>', _axes(low, span, top, log_x)]
    for number, (_, x, y) in enumerate(lines):
        picked = np.linspace(0, len(x) - 1, min(len(x), POINTS)).astype(np.intp)
        points = " ".join(
            at(float(a), float(b)) for a, b in zip(scale(x)[picked], y[picked], strict=True)
        )
        stroke = f'stroke="{_colour(number)}" stroke-width=1.6 stroke-linejoin=round'
        parts.append(f'<polyline points="{points}" fill=none {stroke} />')
    return "".join([*parts, "</svg>"])


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _key(names: Sequence[str], axes: str) -> str:
    spans = "".join(
        f'<span><i style="background:{_colour(number)}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return f"<p class=key><em>{escape(axes)}</em>{spans}</p>"


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round values in the range, 1, 2 or 5 times a power of ten apart."""
    rough = max(high - low, 1e-9) / 6
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return [
        float(v) for v in np.arange(np.ceil(low / step), np.floor(high / step + 1e-6) + 1) * step
    ]


def _decades(low: float, high: float) -> list[float]:
    """Base-10 logarithms in the range of the numbers 1, 2 and 5 times a power of ten."""
    whole = range(int(np.floor(low)), int(np.ceil(high)) + 1)
    exponents = [n + float(np.log10(m)) for n in whole for m in (1, 2, 5)]
    return [exponent for exponent in exponents if low <= exponent <= high]


def _axes(low: float, span: float, top: float, log_x: bool) -> str:
    width, height = WIDTH - LEFT - 10, HEIGHT - BOTTOM - 24
    parts = []
    for value in _ticks(0.0, top):
        y = 24 + (1 - value / top) * height
        parts.append(f'<path class=grid d="M{LEFT} {y:.1f}h{width}"/>')
        parts.append(f"<text x={LEFT - 6} y={y + 4:.1f} text-anchor=end>{value:.4g}</text>")
    for value in (_decades if log_x else _ticks)(low, low + span):
        x = LEFT + (value - low) / span * width
        label = 10**value if log_x else value
        parts.append(f'<path class=grid d="M{x:.1f} 24v{height}"/>')
        parts.append(
            f"<text x={x:.1f} y={HEIGHT - BOTTOM + 16} text-anchor=middle>{label:.4g}</text>"
        )
    return "".join(parts)
