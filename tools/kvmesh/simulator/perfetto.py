"""A run as a trace for ui.perfetto.dev (Chrome trace event format, JSON object form)."""

from typing import Any

import msgspec
import numpy as np

from kvmesh.simulator.mesh import Simulation

US = 1e6


def perfetto(simulation: Simulation) -> bytes:
    """Each worker a process; its requests are slices (prefill, decode), its load counters."""
    events: list[dict[str, Any]] = []
    numbers = {r.name: i for i, r in enumerate(simulation.worker_records.values())}
    for name, number in numbers.items():
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
    for index in range(len(simulation.workload)):
        events += _request(simulation, index)
    for record in simulation.worker_records.values():
        events += [
            {
                "ph": "C",
                "name": "sequences",
                "pid": numbers[record.name],
                "ts": sample.time * US,
                "args": {"running": sample.running, "waiting": sample.waiting},
            }
            for sample in record.samples
        ]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _request(simulation: Simulation, index: int) -> list[dict[str, Any]]:
    records = simulation.records
    times = records.placed[index], records.first[index], records.ended[index]
    if np.isnan(times).any():
        return []
    placed, first, ended = times
    common = {"cat": "request", "id": index, "pid": records.worker[index], "tid": 0}
    args = {"cached": records.cached[index], "output": records.output[index]}
    return [
        {**common, "ph": "b", "name": "prefill", "ts": placed * US, "args": args},
        {**common, "ph": "e", "name": "prefill", "ts": first * US},
        {**common, "ph": "b", "name": "decode", "ts": first * US},
        {**common, "ph": "e", "name": "decode", "ts": ended * US},
    ]
