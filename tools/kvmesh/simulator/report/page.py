"""Report of several runs as one self-contained HTML page with SVG plots."""

from collections.abc import Sequence
from html import escape

import numpy as np

from kvmesh.simulator.mesh import Simulation
from kvmesh.simulator.options import SimulationOptions
from kvmesh.simulator.records import WorkerRecord
from kvmesh.simulator.report.conditions import conditions
from kvmesh.simulator.report.curves import cached_over_time, distribution
from kvmesh.simulator.report.figures import Figures
from kvmesh.simulator.report.plots import COLOURS, STYLE, Line, plot
from kvmesh.simulator.report.tables import notes, rows


def page(title: str, runs: Sequence[tuple[Simulation, Figures]]) -> str:
    """The HTML report of one or more runs of the same workload."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>",
        f"<style>{STYLE}</style><h1>{escape(title)}</h1>",
        _table([figures for _, figures in runs]),
        *(f"<p class=note>{escape(note)}</p>" for _, figures in runs for note in notes(figures)),
        "<h2>Settings</h2>",
        _settings([simulation.options for simulation, _ in runs]),
        "<h2>Time to first token</h2>",
        plot([_ttft(s, f) for s, f in runs], "seconds", "share of requests", log_x=True),
        "<h2>Cached share of prompt tokens over time</h2>",
        plot([_hits(s, f) for s, f in runs], "virtual seconds", "cached share"),
        "<h2>Sequences running on each worker</h2>",
    ]
    for simulation, figures in runs:
        workers = list(simulation.worker_records.values())
        drawn = workers[: len(COLOURS)]
        extent = f", the first {len(drawn)} of {len(workers)} workers" if drawn != workers else ""
        parts.append(f"<h3>{escape(figures.policy)}{extent}</h3>")
        parts.append(plot(_running(drawn), "virtual seconds", "sequences"))
    return "\n".join(parts) + "</html>\n"


def _table(runs: Sequence[Figures]) -> str:
    head = "".join(f"<th>{escape(run.policy)}</th>" for run in runs)
    body = (
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell(run))}</td>' for run in runs)}"
        for name, cell in rows(runs)
    )
    return f"<table><tr><th></th>{head}</tr>{''.join(body)}</table>"


def _settings(runs: Sequence[SimulationOptions]) -> str:
    """A table of two columns; values that differ between the runs follow each other."""
    rows: dict[str, list[str]] = {}
    for options in runs:
        for name, value in conditions(options):
            values = rows.setdefault(name, [])
            if value not in values:
                values.append(value)
    cells = (
        f"<tr><td>{escape(name)}</td><td>{escape('; '.join(values))}</td></tr>"
        for name, values in rows.items()
    )
    return f"<table class=settings>{''.join(cells)}</table>"


def _ttft(simulation: Simulation, figures: Figures) -> Line:
    records = simulation.records
    values = records.column("first_token") - records.column("arrived")
    return figures.policy, *distribution(values)


def _hits(simulation: Simulation, figures: Figures) -> Line:
    records = simulation.records
    tokens = np.array([r.input_tokens for r in simulation.workload.rounds], dtype=np.float64)
    served = np.array([error is None for error in records.error], dtype=np.float64)
    cached = records.column("cached") * served
    return figures.policy, *cached_over_time(records.column("arrived"), tokens * served, cached)


def _running(workers: Sequence[WorkerRecord]) -> list[Line]:
    return [
        (
            record.name,
            np.array([s.time for s in record.samples]),
            np.array([s.running for s in record.samples], dtype=np.float64),
        )
        for record in workers
    ]
