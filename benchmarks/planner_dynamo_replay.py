"""Dynamo's own planner in Dynamo's offline replay; runs with the interpreter of its installation.

Reads one JSON object from stdin (see `planner_dynamo.py`), and prints one with the figures of each
request and of the fleet. Imports nothing of kvmesh.
"""

import json
import sys
from typing import Any


def main() -> None:
    from dynamo.replay.api import run_trace_replay  # type: ignore[import-not-found]

    asked: dict[str, Any] = json.load(sys.stdin)
    report = run_trace_replay(
        asked["trace"],
        extra_engine_args=asked["engine"],
        num_workers=asked["initial"],
        router_mode="kv_router",
        arrival_speedup_ratio=asked["speed"],
        trace_block_size=asked["trace_block_size"],
        planner_config=asked["planner"],
        capture_per_request=True,
    ).to_dict()
    print("\n" + json.dumps(report, default=str))


if __name__ == "__main__":
    main()
