"""Dynamo's own planner beside ours, from an installation of Dynamo that the user names.

The installation needs `ai-dynamo` 1.6 and an `aisimulate` with its native part. Only traces in the
Mooncake format can be replayed there.
"""

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from planner_rows import ITSELF, Row
from planner_workloads import BLOCK_SIZE, BLOCKS, Scenario

from kvmesh.planner.core.promises import parse_promises
from kvmesh.worker.enginecore.scheduler import SchedulerLimits

TRACE_BLOCK = 512  # tokens of one hash of the trace
LIMIT_S = 1800.0
REPLAY = Path(__file__).with_name("planner_dynamo_replay.py")


class DynamoError(Exception):
    """The named installation cannot run the replay; the message has the end of its errors."""


def dynamo_itself(
    installation: Path, trace: Path, scenario: Scenario, startup_s: float, target: str, number: int
) -> Row:
    """One run of Dynamo's planner; raises DynamoError."""
    ttft, itl = (
        parse_promises(metric, [text])[0].seconds
        for metric, text in (("ttft", scenario.ttft), ("itl", scenario.itl))
    )
    limits = SchedulerLimits(block_size=BLOCK_SIZE)
    asked = {
        "trace": str(trace.resolve()),
        "speed": scenario.speed,
        "initial": scenario.initial,
        "trace_block_size": TRACE_BLOCK,
        "engine": {
            "engine": {
                "num_gpu_blocks": BLOCKS,
                "block_size": BLOCK_SIZE,
                "max_num_seqs": limits.max_sequences,
                "max_num_batched_tokens": limits.max_batched_tokens,
            },
            "startup_time": startup_s,
        },
        "planner": {
            "mode": "agg",
            "backend": "mocker",
            "optimization_target": target,
            "ttft_ms": ttft * 1000,
            "itl_ms": itl * 1000,
            "min_endpoint": 1,
            "min_gpu_budget": 1,
            "max_gpu_budget": scenario.most,
            "decode_engine_num_gpu": 1,
            "prefill_engine_num_gpu": 1,
            **({"enable_throughput_scaling": True, "enable_load_scaling": True}
               if target == "sla" else {}),
        },
    }  # fmt: skip
    report = _replayed(installation, asked)
    return _row(report, scenario, startup_s, f"{ITSELF}, {target} {number}", ttft, itl)


def _replayed(installation: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The report of Dynamo's replay."""
    try:
        with TemporaryDirectory() as reports:  # it writes reports where it runs
            done = subprocess.run(
                [installation.absolute() / "bin" / "python", REPLAY.absolute()],
                input=json.dumps(asked),
                capture_output=True,
                text=True,
                cwd=reports,
                timeout=LIMIT_S,
                check=True,
            )
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report
    except subprocess.CalledProcessError as error:
        raise DynamoError(f"{installation}: {error.stderr.strip()[-300:]}") from None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise DynamoError(f"{installation}: {error}") from None


def _row(
    report: dict[str, Any],
    scenario: Scenario,
    startup_s: float,
    policy: str,
    ttft_s: float,
    itl_s: float,
) -> Row:
    requests = report["per_request"]
    failed = sum(r["terminal_status"] != "completed" for r in requests)

    def column(name: str) -> Any:
        return np.array([np.nan if r[name] is None else r[name] for r in requests], dtype=float)

    ttft, itl, output = column("ttft_ms") / 1000, column("itl_ms") / 1000, column("output_length")
    itl = np.where(output > 1, itl, 0.0)
    good = (ttft <= ttft_s) & (itl <= itl_s)
    end_s = float(np.nanmax(column("terminal_time_ms"))) / 1000
    device_s, sizes = _devices(report["planner"]["lifecycle_operations"], scenario.initial, end_s)
    return Row(
        scenario.name, startup_s, policy,
        kept=float(np.mean(good)),
        ttft_p50=float(np.nanmedian(ttft)),
        ttft_p99=float(np.nanquantile(ttft, 0.99)),
        itl_p99=float(np.nanquantile(itl, 0.99)),
        hours=device_s / 3600,
        goodput=float(np.nansum(output[good])) / max(device_s, 1.0),
        least=min(sizes),
        most=max(sizes),
        changes=len(report["planner"]["scaling_events"]),
        failed=failed,
        lasted_h=end_s / 3600,
        flat=scenario.flat,
    )  # fmt: skip


def _devices(
    operations: list[dict[str, Any]], initial: int, end_s: float
) -> tuple[float, list[int]]:
    """Seconds of all workers, from the start of each until its end, and the fleet's sizes."""
    total, at, size = 0.0, 0.0, initial
    sizes = [initial]
    for operation in operations:
        now = min(operation["at_ms"] / 1000, end_s)
        total += size * (now - at)
        state, at = operation["state_after_batch"], now
        size = sum(len(state[name]) for name in ("active", "starting", "draining"))
        sizes.append(len(state["active"]) + len(state["starting"]))
    return total + size * (end_s - at), sizes
