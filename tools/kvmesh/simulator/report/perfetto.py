"""Trace of a run for ui.perfetto.dev (Chrome trace event format, JSON object form)."""

from typing import Any

import msgspec
import numpy as np

from kvmesh.simulator.mesh import Simulation

US = 1e6


def perfetto(simulation: Simulation) -> bytes:
    """Worker incarnations as processes, prefills and decodes as slices, load as counters."""
    events: list[dict[str, Any]] = []
    for number, record in enumerate(simulation.worker_records.values()):
        name = {"name": record.name}
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": name})
        events += [
            {
                "ph": "C",
                "name": "sequences",
                "pid": number,
                "ts": sample.time * US,
                "args": {"running": sample.running, "waiting": sample.waiting},
            }
            for sample in record.samples
        ]
    for index in range(len(simulation.workload)):
        events += _request(simulation, index)
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _request(simulation: Simulation, index: int) -> list[dict[str, Any]]:
    records = simulation.records
    times = records.placed[index], records.first_token[index], records.ended[index]
    if np.isnan(times).any():
        return []
    placed, first, ended = times
    common = {"cat": "request", "id": index, "tid": 0}
    prefill = {**common, "name": "prefill", "pid": records.prefiller[index]}
    decode = {**common, "name": "decode", "pid": records.worker[index]}
    args = {"cached": records.cached[index], "output": records.output[index]}
    return [
        {**prefill, "ph": "b", "ts": placed * US, "args": args},
        {**prefill, "ph": "e", "ts": first * US},
        {**decode, "ph": "b", "ts": first * US},
        {**decode, "ph": "e", "ts": ended * US},
    ]
