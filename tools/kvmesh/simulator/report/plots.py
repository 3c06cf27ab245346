"""Line plots as SVG, for self-contained HTML pages."""

from collections.abc import Sequence
from html import escape

import numpy as np

from kvmesh.simulator.records import Column

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
.settings td{text-align:left}
th{border-bottom:1px solid var(--soft)}tr:nth-child(even){background:var(--band)}
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
svg .grid{stroke:var(--line)}.key,.note{margin:0;font-size:.85rem}
.key span{margin-right:1.2rem;white-space:nowrap}
.key i{display:inline-block;width:1.1rem;height:.2rem;margin-right:.4rem;vertical-align:middle}
.key em{float:right;color:var(--soft);font-style:normal}
"""
Line = tuple[str, Column, Column]


def plot(lines: Sequence[Line], x_name: str, y_name: str, log_x: bool = False) -> str:
    """Lines of (name, x values, y values) in one plot with a key; a line breaks where y is NaN."""
    lines = [line for line in lines if not np.isnan(line[2]).all()]
    if not lines:
        return "<p>no data</p>"
    scale = np.log10 if log_x else np.asarray
    low = min(float(scale(x).min()) for _, x, _ in lines)
    high = max(float(scale(x).max()) for _, x, _ in lines)
    top = max(float(np.nanmax(y)) for _, _, y in lines) or 1.0
    span = max(high - low, 1e-9)
    width, height = WIDTH - LEFT - 10, HEIGHT - BOTTOM - 24

    def at(x: float, y: float) -> str:
        return f"{LEFT + (x - low) / span * width:.1f},{24 + (1 - y / top) * height:.1f}"

    parts = [_key([name for name, _, _ in lines], f"{y_name} over {x_name}")]
    parts += [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img>', _axes(low, span, top, log_x)]
    for number, (_, x, y) in enumerate(lines):
        picked = np.linspace(0, len(x) - 1, min(len(x), POINTS)).astype(np.intp)
        stroke = f'stroke="{_colour(number)}" stroke-width=1.6 stroke-linejoin=round'
        for piece in _pieces(scale(x)[picked], y[picked]):
            points = " ".join(at(a, b) for a, b in (piece if len(piece) > 1 else 2 * piece))
            parts.append(f'<polyline points="{points}" fill=none {stroke} stroke-linecap=round />')
    return "".join([*parts, "</svg>"])


def _pieces(x: Column, y: Column) -> list[list[tuple[float, float]]]:
    """The points of a line, split where y is NaN."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if not np.isnan(b):
            pieces[-1].append((a, b))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


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
